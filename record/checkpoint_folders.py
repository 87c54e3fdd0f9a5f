"""A checkpoint whose tensors lie in parts, one file a rank: a folder, whole or not there, known by the digests of its files.

    full-ba000000001200-DIGEST.parts/
        files.json                                   each file's bytes and digest; its own digest is in the folder's name
        run.pt                                       all but the tensors in parts, whose names and shapes it has
        shard-00001-model-00001-of-00001.safetensors the parts of rank 0; shard-00002: of rank 1

All ranks write at once into a folder of another name, through torch.distributed.checkpoint. It is renamed when every file
is on the disk and has a digest. So the ranks of all machines have to see one folder. A rank that dies, or finds no room,
leaves no checkpoint. Any number of ranks reads it: each what it needs of every tensor.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from cli.files import open_regular, read_regular, to_disk
from weights.parts import is_part

SUFFIX = ".parts"
FILES, RUN = "files.json", "run.pt"
BLOCK = 1 << 24
Gather = Callable[[Any], list[Any]]


def flattened(content: Any, is_wanted: Callable[[Tensor], bool], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of all wanted tensors in nested dictionaries; names are joined by dots."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            if is_wanted(value):
                yield name, value
        elif isinstance(value, Mapping):
            yield from flattened(value, is_wanted, f"{name}.")


def _outlined(content: Any) -> Any:
    """Return a content where a tensor in parts is one without memory (on meta)."""
    if isinstance(content, Tensor):
        return torch.empty(content.shape, dtype=content.dtype, device="meta") if is_part(content) else content
    return {key: _outlined(value) for key, value in content.items()} if isinstance(content, Mapping) else content


def digest_of(path: Path) -> str:
    """Return 32 hex digits over a file's bytes."""
    digest = xxhash.xxh3_128()
    with open_regular(path, None) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write(folder: Path, name: str, content: Mapping[str, Any], rank: int, gather: Gather, group: Any) -> Path:
    """Write a checkpoint; all ranks call it.

    Args:
        name: its beginning, as of checkpoint_files.stem.
        gather: gives all ranks' values to each of them.
        group: of processes, in which the ranks agree on who writes what.

    Raises:
        OSError: on all ranks, where one could not write; nothing is left of it.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    place = folder / f".{name}.tmp"

    def begin() -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        with open(place / RUN, "wb") as file:
            torch.save(_outlined(dict(content)), file)
        to_disk(place / RUN)

    def own() -> dict[str, tuple[int, str]]:
        mine = [*place.glob(f"shard-{rank + 1:05d}-*"), *([place / RUN] if rank == 0 else [])]
        return {path.name: (path.stat().st_size, digest_of(path)) for path in mine}

    def end(parts: list[dict[str, tuple[int, str]]]) -> str:
        files = {name: list(of) for part in parts for name, of in part.items()}
        if unseen := [name for name in files if not (place / name).is_file()]:
            raise OSError(None, f"rank 0 does not see {', '.join(unseen[:3])}: all ranks need one folder")
        (place / FILES).write_text(json.dumps(files, indent=1, sort_keys=True) + "\n")
        to_disk(place / FILES)
        to_disk(place)
        final = folder / f"{name}-{digest_of(place / FILES)}{SUFFIX}"
        remove(final)  # the same bytes, of a life of the run that was cut back to before this batch
        place.rename(final)
        to_disk(folder)
        remove_others(final, name)
        return final.name

    try:
        _on_first(begin, rank, gather)
        writer = HuggingFaceStorageWriter(str(place), save_distributed=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.distributed")  # its advice, once a save
            tensors = dict(flattened(content, is_part))
            _together(lambda: save(tensors, storage_writer=writer, process_group=group), rank, gather)
        parts = _together(own, rank, gather)
        return folder / _on_first(lambda: end(parts), rank, gather)
    except BaseException:
        if rank == 0:
            shutil.rmtree(place, ignore_errors=True)
        raise


def _together(work: Callable[[], Any], rank: int, gather: Gather) -> list[Any]:
    """Let all ranks work, and return what each has. Raises OSError: on all ranks, what one has raised."""
    from torch.distributed.checkpoint.api import CheckpointException

    found, error = None, None
    try:
        found = work()
    except (Exception, CheckpointException) as raised:  # the second is no Exception
        error = _reason(raised, rank)
    results = gather((found, error))
    if text := next((text for _, text in results if text is not None), None):
        raise OSError(None, text)
    return [result for result, _ in results]


def _on_first(work: Callable[[], Any], rank: int, gather: Gather) -> Any:
    return _together(work if rank == 0 else lambda: None, rank, gather)[0]


def _reason(error: BaseException, rank: int) -> str:
    """Return whose error it is, and the line that says why. torch's own holds those of all ranks."""
    for rank, failure in getattr(error, "failures", {}).items():
        return _reason(failure[0] if isinstance(failure, tuple) else failure, rank)
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"rank {rank}: {why.splitlines()[0]}"


def fault(path: Path) -> str | None:
    """Say what is wrong with a checkpoint's files, or None: every byte is there."""
    wrong = "is cut, changed, or of another save"
    try:
        if digest_of(path / FILES) != path.name.removesuffix(SUFFIX).rpartition("-")[2]:
            return f"its {FILES} {wrong}"
        files = json.loads(read_regular(path / FILES))
        for name, known in files.items():
            if [(path / name).stat().st_size, digest_of(path / name)] != known:
                return f"its {name} {wrong}"
    except FileNotFoundError as error:
        return f"its {Path(error.filename).name} is missing"
    if others := sorted(f.name for f in path.glob("*.safetensors") if f.name not in files):
        return f"{others[0]} is none of its files"
    return None


def load(path: Path, into: Mapping[str, Tensor]) -> None:
    """Read tensors by name into those given, of the same whole shapes: a part, where one is a part. All ranks call it."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as load_parts

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed")  # its advice, once a save
        no_dist = not any(map(is_part, into.values()))
        load_parts(dict(into), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=no_dist)


def filled(path: Path, content: Mapping[str, Any], sections: tuple[str, ...]) -> dict[str, Any]:
    """Return an outline with whole tensors, on the CPU, in these of its sections."""
    into: dict[str, Tensor] = {}

    def made(value: Any, name: str) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            into[name] = torch.empty(value.shape, dtype=value.dtype)
            return into[name]
        if isinstance(value, Mapping):
            return {key: made(one, f"{name}.{key}") for key, one in value.items()}
        return value

    found = {key: made(value, key) if key in sections else value for key, value in content.items()}
    load(path, into)
    return found


def size_of(path: Path) -> int:
    """Return the bytes of a checkpoint, a file or a folder."""
    return sum(f.stat().st_size for f in path.iterdir()) if path.is_dir() else path.stat().st_size


def remove(path: Path) -> None:
    """Remove a checkpoint, a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_others(path: Path, name: str) -> None:
    """Remove checkpoints of the same batch: of a life of the run that was cut back to before it."""
    for other in path.parent.glob(f"{name}-*"):
        if other != path and other.suffix in (".pt", SUFFIX):
            remove(other)
