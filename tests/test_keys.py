"""keys.u64: which samples a stage has, and whether others are among them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from streaming import StreamingDataset

from stages.dataset import read_stage
from stages.keys import KEYS_FILE, are_in, key_digest


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
    stage, known = read_stage(str(miniature.moments)), np.fromfile(miniature.moments / KEYS_FILE, "<u8")
    others = [key_digest({"key": "000000000", "caption": caption}) for caption in ("", "a cat")]
    ends = np.array([0, 2**64 - 1, *others, known[0], known[-1]], np.uint64)
    assert are_in(stage, ends, None).tolist() == [False, False, False, False, True, True]
    assert are_in(stage, known[:0], None).tolist() == []
    assert are_in(replace(stage, facts={}), ends, None) is None


def test_a_list_that_is_not_whole_is_refused(miniature, tmp_path):
    stage = replace(read_stage(str(miniature.moments)), location=str(tmp_path))
    path, wanted = tmp_path / KEYS_FILE, stage.facts["keys_xxh64"]
    with pytest.raises(ValueError) as error:
        are_in(stage, np.zeros(1, np.uint64), None)
    assert str(error.value) == f"{path} cannot be read: No such file or directory; dataset.json names it. Copy it anew."
    path.write_bytes(bytes(8))
    with pytest.raises(ValueError) as error:
        are_in(stage, np.zeros(1, np.uint64), None)
    found = xxhash.xxh64(bytes(8)).hexdigest()
    assert str(error.value) == f"{path} is damaged: its xxh64 is {found}, dataset.json says {wanted}. Copy it anew."


def test_the_list_of_a_stage_in_a_store_is_fetched_once_and_compared(miniature, store, tmp_path, monkeypatch):
    client, variables = store
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    list_of = (miniature.moments / KEYS_FILE).read_bytes()
    stage, known = (
        replace(read_stage(str(miniature.moments)), location="s3://easel/keys"),
        np.frombuffer(list_of, "<u8"),
    )
    with pytest.raises(ValueError, match="keys.u64"):
        are_in(stage, known, str(tmp_path / "cache"))
    client.put_object(Bucket="easel", Key=f"keys/{KEYS_FILE}", Body=list_of)
    assert are_in(stage, known, str(tmp_path / "cache")).all()
    (tmp_path / "cache" / KEYS_FILE).write_bytes(list_of[:-1])  # damaged: fetched again
    assert are_in(stage, known, str(tmp_path / "cache")).all()
    client.delete_object(Bucket="easel", Key=f"keys/{KEYS_FILE}")
    assert are_in(stage, known, str(tmp_path / "cache")).all()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [KEYS_FILE]


def test_of_several_captions_the_first_usable_one_counts():
    """As in a stage that is made of such a data set, whose caption it is."""
    one = key_digest({"key": "7", "caption": "a dog"})
    assert (
        key_digest({"key": "7", "caption": ["", " a dog ", "another"]})
        == one
        != key_digest({"key": "7", "caption": []})
    )
