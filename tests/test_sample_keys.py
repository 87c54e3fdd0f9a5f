"""keys.u64: which samples a stage has, and whether others are among them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from streaming import StreamingDataset

from mds.dataset import KEYS_FILE, find_known_keys, key_digest, read_dataset


def stored_in(folder: Path) -> list[int]:
    """What the file has to hold, from the samples themselves."""
    dataset = StreamingDataset(local=str(folder), batch_size=1, shuffle=False)
    samples = [dataset[n] for n in range(len(dataset))]
    return sorted(xxhash.xxh3_64(f"{s['key']}\0{s['caption']}").intdigest() for s in samples)


def test_a_stage_has_the_sorted_digests_of_its_samples_keys_and_captions(miniature):
    for folder in (miniature.images, miniature.moments):
        found = np.fromfile(folder / KEYS_FILE, "<u8").tolist()
        assert found == stored_in(folder) and len(found) == 192
        digest = xxhash.xxh64((folder / KEYS_FILE).read_bytes()).hexdigest()
        assert json.loads((folder / "dataset.json").read_text())["keys_xxh64"] == digest
    assert (miniature.images / KEYS_FILE).read_bytes() == (miniature.moments / KEYS_FILE).read_bytes()


def test_samples_are_looked_up_by_key_and_caption(miniature):
    stage, known = read_dataset(str(miniature.moments)), np.fromfile(miniature.moments / KEYS_FILE, "<u8")
    others = [key_digest({"key": "000000000", "caption": caption}) for caption in ("", "a cat")]
    ends = np.array([0, 2**64 - 1, *others, known[0], known[-1]], np.uint64)
    assert find_known_keys(stage, ends, None).tolist() == [False, False, False, False, True, True]
    assert find_known_keys(stage, known[:0], None).tolist() == []
    assert find_known_keys(replace(stage, metadata={}), ends, None) is None


def test_a_missing_or_damaged_list_is_refused(miniature, tmp_path):
    stage = replace(read_dataset(str(miniature.moments)), location=str(tmp_path))
    path, wanted = tmp_path / KEYS_FILE, stage.metadata["keys_xxh64"]
    with pytest.raises(ValueError, match=f"^{path} cannot be read: No such file or directory; dataset.json names it. "):
        find_known_keys(stage, np.zeros(1, np.uint64), None)
    path.write_bytes(bytes(8))
    digest = xxhash.xxh64(bytes(8)).hexdigest()
    with pytest.raises(ValueError, match=f"^{path} is damaged: its xxh64 is {digest}, dataset.json says {wanted}. "):
        find_known_keys(stage, np.zeros(1, np.uint64), None)


def test_the_list_of_a_remote_dataset_is_fetched_once_and_compared(miniature, in_store, store, tmp_path):
    (tmp_path / "keys").mkdir()
    shutil.copy(miniature.moments / KEYS_FILE, tmp_path / "keys")
    remote, cache = in_store(tmp_path / "keys", "keys"), tmp_path / "cache"
    content = (miniature.moments / KEYS_FILE).read_bytes()
    stage, known = read_dataset(str(miniature.moments)), np.frombuffer(content, "<u8")
    with pytest.raises(ValueError, match="keys.u64"):
        find_known_keys(replace(stage, location=f"{remote}/none"), known, str(cache))
    stage = replace(stage, location=remote)
    assert find_known_keys(stage, known, str(cache)).all()
    (cache / KEYS_FILE).write_bytes(content[:-1])  # damaged: fetched again
    assert find_known_keys(stage, known, str(cache)).all()
    store[0].delete_object(Bucket="easel", Key=f"keys/{KEYS_FILE}")
    assert find_known_keys(stage, known, str(cache)).all()
    assert [path.name for path in cache.iterdir()] == [KEYS_FILE]


def test_of_several_captions_the_first_usable_one_counts():
    """As in a stage that is made of such a data set, whose caption it is."""
    one = key_digest({"key": "7", "caption": "a dog"})
    assert key_digest({"key": "7", "caption": ["", " a dog ", "another"]}) == one
    assert key_digest({"key": "7", "caption": []}) != one
