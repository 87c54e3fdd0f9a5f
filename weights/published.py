"""Check whether published weights fit our modules, and load them.

`find_problems` compares names and shapes and reports differences with their likely cause; `load_networks` copies the tensors.
Both take a diffusers folder or an LDM file; weights/ldm_names.py describes these two and maps the tensors' names.

    networks = {"vae": (module, ldm_names.vae(module)), "text": (clip, ldm_names.open_clip_text(clip))}
    find_problems("512-base-ema.ckpt", networks) or load_networks("512-base-ema.ckpt", networks)

Not diffusers' from_single_file: it guesses a configuration, downloads it, and builds its own modules.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.value_types import join_first
from weights.encoder_networks import CLIP_END
from weights.files import WeightsFile, choose_weight_files, open_sharded_weights, open_weights, printable
from weights.hub_names import resolve_weights_path
from weights.ldm_names import POSITION_IDS, NetworkNames, TensorSource, find_stored_name
from weights.tensors import canonical_name, format_difference

# The attention of a VAE in older diffusers; the published VAEs of SD 1.x and 2 still use these names
OLD_ATTENTION = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
LANGUAGE_MODEL_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
"""What the names of a language model's tensors begin with where it is stored with its head or its image encoder."""

Networks = Mapping[str, tuple[nn.Module, NetworkNames]]
"""Name in messages, e.g. "vae" -> the module and its names in published weights."""


# --- comparison with the modules ---


@dataclass(frozen=True)
class _NetworkSources:
    """Where a network's tensors are: our tensor's name -> its source in `weights`, with its full name there."""

    weights: WeightsFile
    sources: Mapping[str, TensorSource]


def find_problems(path: str, networks: Networks) -> list[str]:
    """Return why the weights at `path` do not fit these networks; [] if they fit. Reads names and shapes alone.

    Args:
        path: a diffusers folder, an LDM file, or a name of the hub that was fetched.
        networks: name in messages, e.g. "vae" -> the module (on any device, "meta" too) and its names in published weights.
    """
    return _examine(path, networks)[1]


def _examine(path: str, networks: Networks) -> tuple[dict[str, _NetworkSources], list[str]]:
    assert networks
    root = resolve_weights_path(path)
    try:
        if not root.exists():
            return {}, [f"{root}: there is no such file or folder. Give a diffusers folder or an LDM file."]
        return _examine_folder(root, networks) if root.is_dir() else _examine_file(root, networks)
    except OSError as error:  # no permission, or an impossible path
        return {}, [f"{root}: cannot be looked into ({error.strerror}). Give a diffusers folder or an LDM file."]


def _examine_folder(root: Path, networks: Networks) -> tuple[dict[str, _NetworkSources], list[str]]:
    folders = {label: _find_folder(root, network, len(networks)) for label, (_, network) in networks.items()}
    if absent := [f"{network.folder}/" for label, (_, network) in networks.items() if not folders[label].is_dir()]:
        contents = f"A diffusers folder has one for each network; this one has: {_list_folder(root)}"
        return {}, [f"{root}: has no {', '.join(absent)}. {contents}. To load an LDM file, give its own path."]
    network_sources, problems = {}, []
    for label, (module, network) in networks.items():
        folder = folders[label]
        problems += _compare_config(label, folder, network)
        files = choose_weight_files([path.name for path in folder.iterdir()], network.stems)
        try:
            if not files:
                names = f"{network.stems[0]}.safetensors, {network.stems[1]}.bin"
                raise ValueError(
                    f"{folder} has none of {names}, or not all of their parts. It has: {_list_folder(folder)}."
                )
            weights = open_sharded_weights(folder / files[0]) if len(files) > 1 else open_weights(folder / files[0])
        except ValueError as error:
            problems.append(f"{label}: {error}")
            continue
        names = [name for name in module.state_dict() if not name.endswith(OPTIONAL_SUFFIX)]
        sources = {name: TensorSource(_find_name_in_folder(name, weights.entries)) for name in names}
        network_sources[label] = _NetworkSources(weights, sources)
        unused = network.unused if network.is_folder_only else POSITION_IDS  # else it is of a single file's names
        required_names = [
            name
            for name in weights.entries
            if not (POSITION_IDS.fullmatch(name) or unused.fullmatch(name) or name.endswith(OPTIONAL_SUFFIX))
        ]
        problems += _compare_tensors(label, module, network_sources[label], required_names)
    return network_sources, problems


def _find_folder(root: Path, network: NetworkNames, num_networks: int) -> Path:
    """Return a network's folder: `root` itself if it has the weights and they are of the only network."""
    folder = root / network.folder
    if num_networks > 1 or folder.is_dir() or not (root / "config.json").is_file():
        return folder
    return root if choose_weight_files([path.name for path in root.iterdir()], network.stems) else folder


def _examine_file(path: Path, networks: Networks) -> tuple[dict[str, _NetworkSources], list[str]]:
    if folder_only := [label for label, (_, network) in networks.items() if network.is_folder_only]:
        text = f"{path}: is one file, but {', '.join(folder_only)} of this model are read from folders alone"
        return {}, [f"{text}. Give a diffusers folder."]
    try:
        weights = open_weights(path)
    except ValueError as error:
        return {}, [str(error)]
    network_sources, problems = {}, []
    for label, (module, network) in networks.items():
        stored = {
            name.removeprefix(network.prefix): name for name in weights.entries if name.startswith(network.prefix)
        }
        if not stored:
            text = f"{label}: {path} has no {network.prefix}*. It has {_count_groups(weights.entries)}"
            problems.append(f"{text}. Give a whole LDM checkpoint or a diffusers folder of this model.")
            continue
        sources = {}
        for name in module.state_dict():
            source = network.source(name)
            stored_name = find_stored_name(network.prefix + source.name, weights.entries, network.prefix)
            sources[name] = replace(source, name=stored_name)
        network_sources[label] = _NetworkSources(weights, sources)
        required_names = [name for short_name, name in stored.items() if not network.unused.match(short_name)]
        problems += _compare_adjacent_config(label, path, network)
        problems += _compare_tensors(label, module, network_sources[label], required_names)
    return network_sources, problems


def _compare_tensors(
    label: str, module: nn.Module, located: _NetworkSources, required_names: Iterable[str]
) -> list[str]:
    """Compare names and shapes; return one message at most. `required_names`: names in the file that have to be used."""
    entries, tensors = located.weights.entries, module.state_dict()
    expected = {
        source.name: tuple(source.shape_in_file(tensors[name].shape)) for name, source in located.sources.items()
    }
    matched = {name: entries[name] for name in expected if name in entries}
    shapes = [
        f"{name} is {shape}, wanted {expected[name]}"
        for name, (_, shape) in matched.items()
        if not _is_same_shape(shape, expected[name])
    ]
    kinds = (
        ("missing", [name for name in expected if name not in entries]),
        ("left over", [name for name in required_names if name not in expected]),
        ("of another shape", shapes),
        (
            "of no floating-point type",
            [f"{n} is {_dtype_name(t)}" for n, (t, _) in matched.items() if not t.is_floating_point],
        ),
    )
    differences = [f"{len(names)} {kind} ({_format_names(names)})" for kind, names in kinds if names]
    if not differences:
        return []
    width = " These are weights of another width." if len(shapes) > len(matched) / 2 else ""
    text = f"{label}: {located.weights.path} does not fit: {'; '.join(differences)}"
    return [f"{text}.{width} Give the weights of this model in this size."]


def _is_same_shape(stored: Sequence[int], expected: Sequence[int]) -> bool:
    """Return whether the shapes agree, or the file has a 1 x 1 convolution for our linear layer."""
    return tuple(stored) in (tuple(expected), (*expected, 1, 1) if len(expected) == 2 else None)


def _compare_config(label: str, folder: Path, network: NetworkNames) -> list[str]:
    """Compare config.json with the module. A key missing from an old file is skipped: it had only one value then."""
    path = folder / "config.json"
    try:
        stated = json.loads(path.read_text())
    except (OSError, ValueError):
        stated = None
    if not isinstance(stated, dict):
        text = f"{label}: {path} is missing or no JSON of a configuration"
        return [f"{text}. Copy the folder again, with its config.json."]
    return [
        f"{label}: {path} has {key} {stated[key]}, this model's has {ours}: it is of another model. Give this model's."
        for key, ours in network.config_values.items()
        if key in stated and not _is_equal(stated[key], ours)
    ]


def _compare_adjacent_config(label: str, path: Path, network: NetworkNames) -> list[str]:
    """Compare the config.json next to the file of a single network, e.g. unet/diffusion_pytorch_model.safetensors."""
    try:
        is_network_config = network.prefix == "" and "_class_name" in json.loads(
            (path.parent / "config.json").read_text()
        )
    except (OSError, ValueError, TypeError):
        is_network_config = False
    return _compare_config(label, path.parent, network) if is_network_config else []


def _is_equal(stated: Any, ours: Any) -> bool:
    """Return whether two values are equal; one number for all levels equals a list that repeats it."""
    if isinstance(stated, list | tuple) or isinstance(ours, list | tuple):
        first, second = (list(value) if isinstance(value, list | tuple) else None for value in (stated, ours))
        return (first or [stated] * len(second or [])) == (second or [ours] * len(first or []))
    return stated == ours


def _find_name_in_folder(name: str, names: Collection[str]) -> str:
    older = name
    for new, old in OLD_ATTENTION.items():
        older = older.replace(new, old)
    candidates = (name, older, *(prefix + name for prefix in LANGUAGE_MODEL_PREFIXES), find_stored_name(name, names))
    return next((candidate for candidate in candidates if candidate in names), name)


def _count_groups(names: Iterable[str]) -> str:
    """Count names by their first two parts."""
    counts = Counter(".".join(name.split(".")[:2]) for name in names)
    return _format_names([f"{group} ({count})" for group, count in counts.items()])


def _format_names(names: Sequence[str]) -> str:
    return join_first([printable(name) for name in names], 10)


def _list_folder(folder: Path) -> str:
    return _format_names([f"{p.name}/" if p.is_dir() else p.name for p in sorted(folder.iterdir())]) or "nothing"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- loading into the modules ---


def load_networks(path: str, networks: Networks) -> list[str]:
    """Copy the weights into the modules as float32, whatever their stored type; return notes for the user.

    Raises:
        ValueError: what `find_problems` returns, one problem per line; or a tensor is damaged or has non-finite values (some
            modules are already filled then).
    """
    network_sources, problems = _examine(path, networks)
    if problems:
        raise ValueError("\n".join(problems))
    labels_by_dtype: dict[str, list[str]] = {}
    for label, (module, _) in networks.items():
        located = network_sources[label]
        _copy_tensors(label, module, located)
        dtypes = {located.weights.entries[source.name][0] for source in located.sources.values()}
        for dtype in sorted(dtypes - {torch.float32}, key=str):
            labels_by_dtype.setdefault(_dtype_name(dtype), []).append(label)
    return [
        f"{', '.join(labels)}: stored in {dtype} at {path}, {'rounded' if dtype == 'float64' else 'widened'} to float32. "
        "Values were rounded on the way, so the fingerprint is not that of weights stored in float32."
        for dtype, labels in labels_by_dtype.items()
    ]


def _copy_tensors(label: str, module: nn.Module, located: _NetworkSources) -> None:
    for name, tensor in module.state_dict().items():
        assert not tensor.is_meta, name
        if name.endswith(OPTIONAL_SUFFIX):
            continue
        source = located.sources[name]
        values = source.extract(located.weights.tensor(source.name)).reshape(tensor.shape).float()
        if num_bad := int((~torch.isfinite(values)).sum()):
            text = f"{source.name} has {num_bad} of {values.numel()} values that are not finite"
            raise ValueError(f"{label}: {located.weights.path}: {text}. Fetch the file again, or give other weights.")
        with torch.no_grad():
            tensor.copy_(values)


# --- the tokenizer ---

# Without "!": SD 2's folder pads with it, so transformers treats each "!" in a caption as padding
TEST_CAPTIONS = (
    "",
    "a photograph of an astronaut riding a horse",
    "A PHOTOGRAPH of Ångström's Café, naïve & Über-cool, 3.14159",
    "don't, can't; we'll -- \"quoted\" (and) [bracketed]... #tag @name 50% $9.99",
    "  spaces   and\ttabs\nand lines, 🐱 a cat 👩‍🚀, 日本の城, Москва, القاهرة",
    "a very long caption " * 30,
)


def tokenizer_problem(path: str, tokenize: Callable[[Sequence[str]], Tensor], name: str = "tokenizer") -> str | None:
    """Report where a diffusers folder's tokenizer differs from ours; None if it does not, and for an LDM file.

    Users of the trained weights will use the folder's tokenizer. Padding is compared unless the folder pads with the end
    token, which SD 1.x's does and `tokenize` never does.

    Args:
        tokenize: captions -> (B, L) int64, e.g. (6, 77), padded with 0.
        name: the tokenizer's folder in it.
    """
    root = resolve_weights_path(path)
    folder = root / name
    if not root.is_dir():
        return None
    from transformers import CLIPTokenizer, logging

    ours = tokenize(TEST_CAPTIONS).tolist()
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # its log lines are replaced by one message below
    try:
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        encoded = tokenizer(list(TEST_CAPTIONS), padding="max_length", truncation=True, max_length=len(ours[0]))
    except Exception as error:  # transformers raises errors of many types
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        advice = "Copy the folder again, with vocab.json and merges.txt"
        return f"{name}: {folder} is missing, or is not a CLIPTokenizer's ({reason}). {advice}."
    finally:
        logging.set_verbosity(verbosity)
    for caption, expected, theirs in zip(TEST_CAPTIONS, ours, encoded["input_ids"], strict=True):
        end = theirs.index(CLIP_END) + 1 if CLIP_END in theirs else len(theirs)
        length = end if set(theirs[end:]) == {CLIP_END} else len(theirs)
        if theirs[:length] != expected[:length]:
            index = next(i for i in range(length) if theirs[i] != expected[i])
            text = f"for {caption[:60]!r} token {index} is {theirs[index]}, ours is {expected[index]}"
            advice = "Give the weights of this model, with their own tokenizer"
            return f"{name}: {folder} gives other tokens than this model trains with: {text}. {advice}."
    return None


# --- one network from one file, under its own names ---

RANDOM = "random"
RANDOM_SEED = 20160617  # any fixed number: random networks are the same in every command and for every `seed`
OPTIONAL_SUFFIX = "num_batches_tracked"  # counted in training only; files before torch 0.4.1 have none


def file_digest(path: str | Path, kind: str) -> str:
    """Return a file's digest in hexadecimal digits; `kind` is hashlib's name. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def copy_weights(module: nn.Module, weights: WeightsFile, label: str) -> None:
    """Copy a file's tensors into a network, one by one, in the network's own type.

    Args:
        label: the network's name in the message.

    Raises:
        ValueError: names or shapes differ from the network's, or a tensor is unreadable.
    """
    tensors = {name: tensor for name, tensor in module.state_dict().items() if not name.endswith(OPTIONAL_SUFFIX)}
    stored_names = {canonical_name(name): name for name in weights.entries if not name.endswith(OPTIONAL_SUFFIX)}
    expected = {name: f"{tuple(tensor.shape)}" for name, tensor in tensors.items()}
    stored = {name: f"{weights.entries[stored_name][1]}" for name, stored_name in stored_names.items()}
    if text := format_difference(expected, stored):
        raise ValueError(f"{weights.path}: does not fit {label}: {text}. Give the weights of that network.")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(weights.tensor(stored_names[name]))
