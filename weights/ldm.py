"""Check whether published weights fit our modules, and load them.

`problems` compares names and shapes and reports misfits with their likely cause; `load` copies the tensors. Both take a
diffusers folder or an LDM file; weights/ldm_names.py describes these two and maps the tensors' names.

    networks = {"vae": (module, ldm_names.vae(module)), "text": (clip, ldm_names.open_clip_text(clip))}
    ldm.problems("512-base-ema.ckpt", networks) or ldm.load("512-base-ema.ckpt", networks)

Ours, not diffusers' from_single_file: that one builds modules of its own by a configuration that it guesses, and fetches.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weights.clip_text import END_TOKEN
from weights.files import WeightsFile, open_sharded, open_weights, shown, weight_files
from weights.hub_names import place
from weights.ldm_names import POSITION_IDS, Network, Source, stored_name

# The attention of a VAE in older diffusers; the published VAEs of SD 1.x and 2 still use these names
OLD_ATTENTION = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}

Networks = Mapping[str, tuple[nn.Module, Network]]
"""Name in messages, e.g. "vae" -> the module and its place."""


# --- do they fit? ---


@dataclass(frozen=True)
class _Place:
    """A network's place in a file: our tensor's name -> its source, with its full name there."""

    weights: WeightsFile
    sources: Mapping[str, Source]


def problems(path: str, networks: Networks) -> list[str]:
    """Return why the weights at `path` do not fit these networks; [] if they fit. Reads names and shapes alone.

    Args:
        path: a diffusers folder, an LDM file, or a name of the hub that was fetched.
        networks: name in messages, e.g. "vae" -> the module (on any device, "meta" too) and its place.
    """
    return _examine(path, networks)[1]


def _examine(path: str, networks: Networks) -> tuple[dict[str, _Place], list[str]]:
    assert networks
    root = place(path)
    try:
        if not root.exists():
            return {}, [f"{root}: there is no such file or folder. Give a diffusers folder or an LDM file."]
        return _examine_folder(root, networks) if root.is_dir() else _examine_file(root, networks)
    except OSError as error:  # no permission, or an impossible path
        return {}, [f"{root}: cannot be looked into ({error.strerror}). Give a diffusers folder or an LDM file."]


def _examine_folder(root: Path, networks: Networks) -> tuple[dict[str, _Place], list[str]]:
    folders = {label: _folder_of(root, network, len(networks)) for label, (_, network) in networks.items()}
    if absent := [f"{network.folder}/" for label, (_, network) in networks.items() if not folders[label].is_dir()]:
        has = f"A diffusers folder has one for each network; this one has: {_listing(root)}"
        return {}, [f"{root}: has no {', '.join(absent)}. {has}. To load an LDM file, give its own path."]
    places, found = {}, []
    for label, (module, network) in networks.items():
        folder = folders[label]
        found += _other_facts(label, folder, network)
        files = weight_files([path.name for path in folder.iterdir()], network.stems)
        try:
            if not files:
                names = f"{network.stems[0]}.safetensors, {network.stems[1]}.bin"
                raise ValueError(
                    f"{folder} has none of {names}, or not all of their parts. It has: {_listing(folder)}."
                )
            weights = open_sharded(folder / files[0]) if len(files) > 1 else open_weights(folder / files[0])
        except ValueError as error:
            found.append(f"{label}: {error}")
            continue
        sources = {name: Source(_name_in_folder(name, weights.entries)) for name in module.state_dict()}
        places[label] = _Place(weights, sources)
        unused = network.unused if network.only_folders else POSITION_IDS  # else it is of a single file's names
        left_over = [n for n in weights.entries if not (POSITION_IDS.fullmatch(n) or unused.fullmatch(n))]
        found += _misfits(label, module, places[label], left_over)
    return places, found


def _folder_of(root: Path, network: Network, num_networks: int) -> Path:
    """Return a network's folder: the one that was given is its own where it has the weights and nothing else is wanted."""
    own = root / network.folder
    if num_networks > 1 or own.is_dir() or not (root / "config.json").is_file():
        return own
    return root if weight_files([path.name for path in root.iterdir()], network.stems) else own


def _examine_file(path: Path, networks: Networks) -> tuple[dict[str, _Place], list[str]]:
    if of_folders := [label for label, (_, network) in networks.items() if network.only_folders]:
        given = f"{path}: is one file, but {', '.join(of_folders)} of this model are read from folders alone"
        return {}, [f"{given}. Give a diffusers folder."]
    try:
        weights = open_weights(path)
    except ValueError as error:
        return {}, [str(error)]
    places, found = {}, []
    for label, (module, network) in networks.items():
        rests = {name.removeprefix(network.prefix): name for name in weights.entries if name.startswith(network.prefix)}
        if not rests:
            given = f"{label}: {path} has no {network.prefix}*. It has {_groups(weights.entries)}"
            found.append(f"{given}. Give a whole LDM checkpoint or a diffusers folder of this model.")
            continue
        sources = {}
        for name in module.state_dict():
            source = network.source(name)
            named = stored_name(network.prefix + source.name, weights.entries, network.prefix)
            sources[name] = replace(source, name=named)
        places[label] = _Place(weights, sources)
        left_over = [name for rest, name in rests.items() if not network.unused.match(rest)]
        found += _facts_beside(label, path, network)
        found += _misfits(label, module, places[label], left_over)
    return places, found


def _misfits(label: str, module: nn.Module, place: _Place, left_over: Iterable[str]) -> list[str]:
    """Compare names and shapes; return one message at most. `left_over`: names in the file that have to be used."""
    entries, own = place.weights.entries, module.state_dict()
    wanted = {source.name: tuple(source.shape_in_file(own[ours].shape)) for ours, source in place.sources.items()}
    there = {name: entries[name] for name in wanted if name in entries}
    shapes = [
        f"{name} is {shape}, wanted {wanted[name]}"
        for name, (_, shape) in there.items()
        if not _fits(shape, wanted[name])
    ]
    kinds = (
        ("missing", [name for name in wanted if name not in entries]),
        ("left over", [name for name in left_over if name not in wanted]),
        ("of another shape", shapes),
        (
            "of no floating-point type",
            [f"{n} is {_words(t)}" for n, (t, _) in there.items() if not t.is_floating_point],
        ),
    )
    said = [f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds if names]
    if not said:
        return []
    width = " These are weights of another width." if len(shapes) > len(there) / 2 else ""
    given = f"{label}: {place.weights.path} does not fit: {'; '.join(said)}"
    return [f"{given}.{width} Give the weights of this model in this size."]


def _fits(stored: Sequence[int], wanted: Sequence[int]) -> bool:
    """True where the shapes agree, or where the file has a 1 x 1 convolution for our linear layer."""
    return tuple(stored) in (tuple(wanted), (*wanted, 1, 1) if len(wanted) == 2 else None)


def _other_facts(label: str, folder: Path, network: Network) -> list[str]:
    """Compare config.json with the module. A key missing from an old file is skipped: it had only one value then."""
    path = folder / "config.json"
    try:
        stated = json.loads(path.read_text())
    except (OSError, ValueError):
        stated = None
    if not isinstance(stated, dict):
        given = f"{label}: {path} is missing or no JSON of a configuration"
        return [f"{given}. Copy the folder again, with its config.json."]
    return [
        f"{label}: {path} has {key} {stated[key]}, this model's has {ours}: it is of another model. Give this model's."
        for key, ours in network.facts.items()
        if key in stated and not _same(stated[key], ours)
    ]


def _facts_beside(label: str, path: Path, network: Network) -> list[str]:
    """Compare the config.json beside the file of one network alone, e.g. unet/diffusion_pytorch_model.safetensors."""
    try:
        is_its = network.prefix == "" and "_class_name" in json.loads((path.parent / "config.json").read_text())
    except (OSError, ValueError, TypeError):
        is_its = False
    return _other_facts(label, path.parent, network) if is_its else []


def _same(stated: Any, ours: Any) -> bool:
    """Whether two values are equal; one number for all levels equals a list that repeats it."""
    if isinstance(stated, list | tuple) or isinstance(ours, list | tuple):
        first, second = (list(value) if isinstance(value, list | tuple) else None for value in (stated, ours))
        return (first or [stated] * len(second or [])) == (second or [ours] * len(first or []))
    return stated == ours


def _name_in_folder(name: str, names: Collection[str]) -> str:
    older = name
    for new, old in OLD_ATTENTION.items():
        older = older.replace(new, old)
    return older if name not in names and older in names else stored_name(name, names)


def _groups(names: Iterable[str]) -> str:
    """Count names by their first two parts."""
    counts = Counter(".".join(name.split(".")[:2]) for name in names)
    return _some([f"{group} ({count})" for group, count in counts.items()])


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(shown, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _listing(folder: Path) -> str:
    return _some([f"{p.name}/" if p.is_dir() else p.name for p in sorted(folder.iterdir())]) or "nothing"


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- into the modules ---


def load(path: str, networks: Networks) -> list[str]:
    """Copy the weights into the modules as float32, whatever their stored type; return notes for the user.

    Raises:
        ValueError: the `problems`, one per line; or a tensor is damaged or has non-finite values (some modules are already
            filled then).
    """
    places, found = _examine(path, networks)
    if found:
        raise ValueError("\n".join(found))
    stored: dict[str, list[str]] = {}
    for label, (module, _) in networks.items():
        _fill(label, module, places[label])
        dtypes = {places[label].weights.entries[source.name][0] for source in places[label].sources.values()}
        for dtype in sorted(dtypes - {torch.float32}, key=str):
            stored.setdefault(_words(dtype), []).append(label)
    return [
        f"{', '.join(labels)}: stored in {dtype} at {path}, {'rounded' if dtype == 'float64' else 'widened'} to float32. "
        "Values were rounded on the way, so the fingerprint is not that of weights stored in float32."
        for dtype, labels in stored.items()
    ]


def _fill(label: str, module: nn.Module, place: _Place) -> None:
    for ours, tensor in module.state_dict().items():
        assert not tensor.is_meta, ours
        source = place.sources[ours]
        values = source.taken(place.weights.tensor(source.name)).reshape(tensor.shape).float()
        if num_bad := int((~torch.isfinite(values)).sum()):
            given = f"{source.name} has {num_bad} of {values.numel()} values that are not finite"
            raise ValueError(f"{label}: {place.weights.path}: {given}. Fetch the file again, or give other weights.")
        with torch.no_grad():
            tensor.copy_(values)


# --- the tokenizer ---

# Without "!": SD 2's folder pads with it, so transformers treats each "!" in a caption as padding
TELLING_CAPTIONS = (
    "",
    "a photograph of an astronaut riding a horse",
    "A PHOTOGRAPH of Ångström's Café, naïve & Über-cool, 3.14159",
    "don't, can't; we'll -- \"quoted\" (and) [bracketed]... #tag @name 50% $9.99",
    "  spaces   and\ttabs\nand lines, 🐱 a cat 👩‍🚀, 日本の城, Москва, القاهرة",
    "a very long caption " * 30,
)


def tokenizer_problem(path: str, tokenize: Callable[[Sequence[str]], Tensor], name: str = "tokenizer") -> str | None:
    """Say where a diffusers folder's tokenizer differs from ours; None if nowhere, and for an LDM file.

    Users of the trained weights will use the folder's tokenizer. Padding is compared unless the folder pads with the end
    token, which SD 1.x's does and `tokenize` never does.

    Args:
        tokenize: captions -> (B, L) int64, e.g. (6, 77), padded with 0.
        name: of the tokenizer's folder in it.
    """
    root = place(path)
    folder = root / name
    if not root.is_dir():
        return None
    from transformers import CLIPTokenizer, logging

    ours = tokenize(TELLING_CAPTIONS).tolist()
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # its log lines are replaced by one message below
    try:
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        encoded = tokenizer(list(TELLING_CAPTIONS), padding="max_length", truncation=True, max_length=len(ours[0]))
    except Exception as error:  # transformers raises errors of many types
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        way = "Copy the folder again, with vocab.json and merges.txt"
        return f"{name}: {folder} is missing, or is not a CLIPTokenizer's ({reason}). {way}."
    finally:
        logging.set_verbosity(verbosity)
    for caption, want, theirs in zip(TELLING_CAPTIONS, ours, encoded["input_ids"], strict=True):
        end = theirs.index(END_TOKEN) + 1 if END_TOKEN in theirs else len(theirs)
        length = end if set(theirs[end:]) == {END_TOKEN} else len(theirs)
        if theirs[:length] != want[:length]:
            at = next(i for i in range(length) if theirs[i] != want[i])
            given = f"for {caption[:60]!r} token {at} is {theirs[at]}, ours is {want[at]}"
            way = "Give the weights of this model, with their own tokenizer"
            return f"{name}: {folder} gives other tokens than this model trains with: {given}. {way}."
    return None
