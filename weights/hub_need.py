"""What a key takes of a repository on the hub: which files, and what to say where there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weights.files import Refused, weight_files
from weights.hub_names import Name, some


@dataclass(frozen=True)
class Need:
    """What one key takes of a repository: the folders of some networks, or one file.

    networks: folder and stems of its weights, as in ldm_names.Network; whole: folders of which all files are taken; more:
    files that are taken where they are there.
    one_of: names of a single file, the first that is there is taken, or, of none, one whose SHA-256 begins with `sha256`.
    default: the name that stands for none; instead: what to give to do without.
    """

    networks: tuple[tuple[str, tuple[str, str]], ...] = ()
    whole: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    sha256: str | None = None
    default: str | None = None
    instead: str = ""

    def usual(self) -> list[str]:
        """Return the files that a repository usually has, for one that cannot be asked."""
        weights = [
            f"{folder}/{file}" for folder, (stem, _) in self.networks for file in ("config.json", f"{stem}.safetensors")
        ]
        tokens = ("vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json")
        return [
            *weights,
            *(f"{folder}/{file}" for folder in self.whole for file in tokens),
            *self.one_of[:1],
            *self.more,
        ]

    def chosen(self, name: Name, digests: Mapping[str, str | None]) -> list[str]:
        """Return the files to take of those of a repository, weights first. Raises Refused: some are missing."""
        if name.file or not self.networks:
            file = self._one_file(name, digests)
            beside = [str(Path(file).parent / more) for more in self.more]
            return [file, *(path for path in beside if path in digests)]
        files, absent = [], []
        for folder, stems in self.networks:
            before = "" if self._is_alone_in(digests, stems, folder) else f"{folder}/"
            inside = {path.removeprefix(before) for path in digests if path.startswith(before)}
            of_weights = weight_files(inside, stems)
            absent += [] if of_weights else [f"weights in {folder}/"]
            absent += [] if "config.json" in inside else [f"{folder}/config.json"]
            files += [f"{before}{file}" for file in (*of_weights, "config.json")]
        for folder in self.whole:
            inside = [path for path in digests if path.startswith(f"{folder}/")]
            files, absent = files + inside, absent + ([] if inside else [f"{folder}/"])
        if absent:
            raise Refused(
                f"{name} has no {', '.join(absent)}. It has: {some(digests)}. Give a model's diffusers folder."
            )
        return [*files, *(path for path in self.more if path in digests)]

    def _is_alone_in(self, digests: Mapping[str, str | None], stems: tuple[str, str], folder: str) -> bool:
        """True where the only network that is wanted has the whole repository for its folder."""
        has_own = any(path.startswith(f"{folder}/") for path in digests)
        of_root = [path for path in digests if "/" not in path]
        return (
            len(self.networks) == 1 and not has_own and "config.json" in of_root and bool(weight_files(of_root, stems))
        )

    def _one_file(self, name: Name, digests: Mapping[str, str | None]) -> str:
        named = [path for path in ((name.file,) if name.file else self.one_of) if path in digests]
        if not named and not name.file and self.sha256:
            named = [path for path, digest in digests.items() if (digest or "").startswith(self.sha256)]
        if named:
            return named[0]
        wanted = name.file or " or ".join(self.one_of)
        raise Refused(f"{name} has no file {wanted}. It has: {some(digests)}. Give one as hf://{name.repo}/FILE.")
