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

from common.files import open_regular, read_regular, sync_to_disk
from weights.tensors import is_sharded_tensor

SUFFIX = ".parts"
FILES, RUN = "files.json", "run.pt"
BLOCK = 1 << 24
Gather = Callable[[Any], list[Any]]


def flatten_tensors(
    content: Any, is_wanted: Callable[[Tensor], bool], prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of all wanted tensors in nested dictionaries; names are joined by dots."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            if is_wanted(value):
                yield name, value
        elif isinstance(value, Mapping):
            yield from flatten_tensors(value, is_wanted, f"{name}.")


def _without_data(content: Any) -> Any:
    """Return a content where a tensor in parts is one without memory (on meta)."""
    if isinstance(content, Tensor):
        return torch.empty(content.shape, dtype=content.dtype, device="meta") if is_sharded_tensor(content) else content
    return {key: _without_data(value) for key, value in content.items()} if isinstance(content, Mapping) else content


def digest_file(path: Path) -> str:
    """Return 32 hex digits over a file's bytes."""
    digest = xxhash.xxh3_128()
    with open_regular(path, None) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_parts(folder: Path, name: str, content: Mapping[str, Any], rank: int, gather: Gather, group: Any) -> Path:
    """Write a checkpoint; all ranks call it.

    Args:
        name: from `checkpointing.files.file_stem`.
        gather: gives all ranks' values to each of them.
        group: of processes, in which the ranks agree on who writes what.

    Raises:
        OSError: on all ranks, where one could not write; nothing is left of it.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    temporary = folder / f".{name}.tmp"

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        with open(temporary / RUN, "wb") as file:
            torch.save(_without_data(dict(content)), file)
        sync_to_disk(temporary / RUN)

    def own() -> dict[str, tuple[int, str]]:
        own_files = [*temporary.glob(f"shard-{rank + 1:05d}-*"), *([temporary / RUN] if rank == 0 else [])]
        return {path.name: (path.stat().st_size, digest_file(path)) for path in own_files}

    def end(parts: list[dict[str, tuple[int, str]]]) -> str:
        files = {name: list(of) for part in parts for name, of in part.items()}
        if unseen := [name for name in files if not (temporary / name).is_file()]:
            raise OSError(None, f"rank 0 does not see {', '.join(unseen[:3])}: all ranks need one folder")
        (temporary / FILES).write_text(json.dumps(files, indent=1, sort_keys=True) + "\n")
        sync_to_disk(temporary / FILES)
        sync_to_disk(temporary)
        final = folder / f"{name}-{digest_file(temporary / FILES)}{SUFFIX}"
        remove_checkpoint(final)  # the same bytes, left by a start that was rolled back before this batch
        temporary.rename(final)
        sync_to_disk(folder)
        remove_others(final, name)
        return final.name

    try:
        _run_on_first(begin, rank, gather)
        writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.distributed")  # its advice, once a save
            tensors = dict(flatten_tensors(content, is_sharded_tensor))
            _run_on_all(lambda: save(tensors, storage_writer=writer, process_group=group), rank, gather)
        parts = _run_on_all(own, rank, gather)
        return folder / _run_on_first(lambda: end(parts), rank, gather)
    except BaseException:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _run_on_all(work: Callable[[], Any], rank: int, gather: Gather) -> list[Any]:
    """Let all ranks work, and return what each has. Raises OSError: on all ranks, what one has raised."""
    from torch.distributed.checkpoint.api import CheckpointException

    outcome, error = None, None
    try:
        outcome = work()
    except (Exception, CheckpointException) as raised:  # the second is no Exception
        error = _error_reason(raised, rank)
    results = gather((outcome, error))
    if text := next((text for _, text in results if text is not None), None):
        raise OSError(None, text)
    return [result for result, _ in results]


def _run_on_first(work: Callable[[], Any], rank: int, gather: Gather) -> Any:
    return _run_on_all(work if rank == 0 else lambda: None, rank, gather)[0]


def _error_reason(error: BaseException, rank: int) -> str:
    """Return whose error it is, and the line that says why. torch's own holds those of all ranks."""
    for rank, failure in getattr(error, "failures", {}).items():
        return _error_reason(failure[0] if isinstance(failure, tuple) else failure, rank)
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"rank {rank}: {why.splitlines()[0]}"


def find_damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint's files, or None: every byte is there."""
    wrong = "is cut, changed, or of another save"
    try:
        if digest_file(path / FILES) != path.name.removesuffix(SUFFIX).rpartition("-")[2]:
            return f"its {FILES} {wrong}"
        files = json.loads(read_regular(path / FILES))
        for name, recorded in files.items():
            if [(path / name).stat().st_size, digest_file(path / name)] != recorded:
                return f"its {name} {wrong}"
    except FileNotFoundError as error:
        return f"its {Path(error.filename).name} is missing"
    if unlisted := sorted(f.name for f in path.glob("*.safetensors") if f.name not in files):
        return f"{unlisted[0]} is none of its files"
    return None


def load_parts(path: Path, into: Mapping[str, Tensor]) -> None:
    """Read tensors by name into `into`, of the same whole shapes; of a sharded one, this rank's part. All ranks call it."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed")  # its advice, once a load
        no_dist = not any(map(is_sharded_tensor, into.values()))
        load(dict(into), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=no_dist)


def fill_outline(path: Path, content: Mapping[str, Any], sections: tuple[str, ...]) -> dict[str, Any]:
    """Return an outline with whole tensors, on the CPU, in these of its sections."""
    into: dict[str, Tensor] = {}

    def made(value: Any, name: str) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            into[name] = torch.empty(value.shape, dtype=value.dtype)
            return into[name]
        if isinstance(value, Mapping):
            return {key: made(item, f"{name}.{key}") for key, item in value.items()}
        return value

    filled = {key: made(value, key) if key in sections else value for key, value in content.items()}
    load_parts(path, into)
    return filled


def count_file_bytes(path: Path) -> int:
    """Return the bytes of a checkpoint, a file or a folder."""
    return sum(f.stat().st_size for f in path.iterdir()) if path.is_dir() else path.stat().st_size


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_others(path: Path, name: str) -> None:
    """Remove checkpoints of the same batch: left by a start that was rolled back before it."""
    for other in path.parent.glob(f"{name}-*"):
        if other != path and other.suffix in (".pt", SUFFIX):
            remove_checkpoint(other)
