"""Data sets of others: prepare.adopt, and what a run reads of them, against plain streaming's own writer."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import picture, tree
from PIL import Image
from streaming import MDSWriter, StreamingDataset
from streaming.base.hashing import get_hash

import data
from data import DataConfig, StreamingLAIONDataset, build_data
from prepare import adopt, latents
from stages import fetch, stores
from stages.adopted import Columns
from stages.dataset import read_stage, write_facts
from stages.fetch import HASH, RetryingStream, StreamFailure
from stages.mixture import StreamConfig
from training.resume import identity_of
from training.run_config import RunConfig
from zoo import load_family

FAMILY = load_family("sd2", "tiny", "stock")
CPU = torch.device("cpu")
OF_OTHERS = "Others have written it: copy it anew, or write it again with streaming's MDSWriter."
NUM = 24


def row(number: int) -> dict:
    jpg = picture(number)
    return {
        "jpg": jpg,
        "image": Image.open(io.BytesIO(jpg)).convert("RGB"),
        "caption": f"picture number {number}",
        "several": [f"picture number {number}", f"number {number} again"],
        "alt": "" if number % 2 else f"alternative {number}",
        "id": 1000 + number,
        "key": f"{number:03d}",
        "width": 80,
    }


def write(out: Path, columns: dict[str, str], *, num: int = NUM, size_limit: int = 1 << 13, **arguments) -> Path:
    """Write what row() has of these columns with streaming's own writer; a name may say of what: picture=jpg."""
    names = {name.partition("=")[0]: name.rpartition("=")[2] for name in columns}
    encodings = {name.partition("=")[0]: encoding for name, encoding in columns.items()}
    with MDSWriter(out=str(out), columns=encodings, size_limit=size_limit, **arguments) as writer:
        for number in range(num):
            content = row(number)
            writer.write({name: content[of] for name, of in names.items()})
    return out


THEIRS = {"jpg": "bytes", "caption": "str", "width": "int32"}


def epoch(remote: Path, cache: Path | None = None, *, batch: int = 4, workers: int = 0, **keys) -> list[dict]:
    """Read an epoch as a run does."""
    section = DataConfig(remote=str(remote), local=None if cache is None else str(cache), workers=workers, **keys)
    assert section.problems(batch, {}) == []
    size = dict(size=(64, 64), device_batch_size=batch, device=CPU, seed=3)
    loader = build_data(section, FAMILY, **size).dataloader
    try:
        return list(loader)
    finally:
        loader.close()


def same(one: list[dict], other: list[dict]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a) and bool(pairs)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The batches of a stage of our own, of the same pictures and captions in shards of as many."""
    out = write(
        tmp_path_factory.mktemp("ours") / "stage", {"jpg": "bytes", "caption": "str", "key": "str"}, hashes=[HASH]
    )
    write_facts(out, "images", {})
    return epoch(out)


# --- reading ---

PACKED = [
    ("zstd", ["sha1"]),
    ("zstd:7", []),
    ("gz", ["md5", "xxh64"]),
    ("br:3", ["xxh3_64"]),
    ("bz2", ["sha3_256"]),
    ("snappy", []),
    (None, ["blake2b"]),
    (None, []),
]


@pytest.mark.parametrize(("compression", "hashes"), PACKED)
def test_batches_are_those_of_a_stage_of_our_own_however_shards_are_packed(tmp_path, ours, compression, hashes, capsys):
    theirs = write(tmp_path / "theirs", THEIRS, compression=compression, hashes=hashes)
    before = tree(theirs)
    assert adopt.main([str(theirs)]) == 0
    assert {name: content for name, content in tree(theirs).items() if name != "dataset.json"} == before
    cache = tmp_path / "cache"
    assert same(epoch(theirs, cache), ours)
    raw = {Path(shard["raw_data"]["basename"]) for shard in json.loads(before["index.json"])["shards"]}
    kept = {path.relative_to(cache) for path in cache.iterdir() if path.name != ".in_use"}
    assert kept == raw | {Path("index.json")}
    assert same(epoch(theirs, cache, workers=2), ours)  # from the cache, each compared with its digest or size


@pytest.mark.parametrize(
    "columns",
    [
        {"image": "pil", "text": "str"},
        {"IMAGE": "png", "prompt": "str"},
        {"image": "jpeg", "captions": "json", "__key__": "int"},
    ],
)
def test_encodings_of_pictures_and_names_of_columns(tmp_path, columns):
    of = {"text": "caption", "prompt": "caption", "captions": "several", "__key__": "id", "IMAGE": "image"}
    theirs = write(
        tmp_path / "theirs", {f"{name}={of.get(name, name)}": encoding for name, encoding in columns.items()}
    )
    assert adopt.main([str(theirs)]) == 0
    plain = StreamingDataset(local=str(theirs), batch_size=1)
    pixels = [np.asarray(plain[number][next(iter(columns))].convert("RGB")) for number in range(NUM)]
    stage = read_stage(str(theirs))
    read = RetryingStream(local=str(theirs), adopted=stage.adopted, index_sha256=stage.index_sha256)
    dataset = StreamingLAIONDataset(family=FAMILY, image_sizes=[(64, 64)], streams=[read], batch_size=4)
    for number in (0, 7, NUM - 1):
        sample = dataset[number]
        assert np.array_equal(data.decode_image(sample["jpg"]).permute(1, 2, 0), pixels[number])
        assert sample["caption"] == (row(number)["several"] if "captions" in columns else [f"picture number {number}"])
        assert sample["key"] == (str(1000 + number) if "__key__" in columns else str(number))
        assert dataset.read_sample(number)["caption"] in sample["caption"]


def test_captions_of_several_columns_are_read_in_order_and_empty_ones_passed_over(tmp_path):
    theirs = write(tmp_path / "theirs", {"jpg": "bytes", "alt": "str", "several": "json"})
    assert adopt.main([str(theirs), "caption=alt,several"]) == 0
    columns = read_stage(str(theirs)).adopted
    assert columns == Columns(captions=("alt", "several"), image="jpg")
    read = RetryingStream(local=str(theirs), adopted=columns)
    dataset = StreamingLAIONDataset(family=FAMILY, image_sizes=[(64, 64)], streams=[read], batch_size=4)
    assert data.captions_of(dataset[2]) == ["alternative 2", "picture number 2", "number 2 again"]
    assert data.captions_of(dataset[3]) == ["picture number 3", "number 3 again"]


def test_an_empty_first_shard_which_streamings_writer_leaves_is_read(tmp_path, ours):
    """Of samples that are larger than its limit it writes one a shard, after an empty one."""
    theirs = write(tmp_path / "theirs", THEIRS, size_limit=1000)
    assert json.loads((theirs / "index.json").read_text())["shards"][0]["samples"] == 0
    assert adopt.main([str(theirs)]) == 0
    texts = {tuple(tokens.tolist()) for batch in epoch(theirs, tmp_path / "cache") for tokens in batch["tokens"]}
    assert texts == {tuple(tokens.tolist()) for batch in ours for tokens in batch["tokens"]}


def test_facts_may_lie_elsewhere_and_a_cache_may_be_small(tmp_path, ours):
    theirs = write(tmp_path / "theirs", THEIRS, compression="zstd")
    before = tree(theirs)
    assert adopt.main([str(theirs), f"facts={tmp_path}/facts/theirs.json"]) == 0 and tree(theirs) == before
    limit = f"{4 * read_stage(str(theirs), f'{tmp_path}/facts/theirs.json').largest_shard_bytes // 1024 + 1}kb"
    cache, facts = tmp_path / "cache", f"{tmp_path}/facts/theirs.json"
    assert same(epoch(theirs, cache, facts=facts, cache_limit=limit), ours)


def test_a_resume_in_mid_epoch_goes_on_with_the_same_batches(tmp_path, ours):
    theirs = write(tmp_path / "theirs", THEIRS, compression="zstd")
    assert adopt.main([str(theirs)]) == 0
    section = DataConfig(remote=str(theirs), local=str(tmp_path / "cache"), workers=0)
    loader = build_data(section, FAMILY, size=(64, 64), device_batch_size=4, device=CPU, seed=3).dataloader
    loader.resume(epoch=0, batch_in_epoch=4, global_batch_size=4)
    assert same(list(loader), ours[4:])
    loader.close()


# --- what is damaged ---


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(fetch, "SOON_SEC", (0.0, 0.0))


def stream(theirs: Path, cache: Path | None) -> StreamingLAIONDataset:
    stage = read_stage(str(theirs))
    places = {"local": str(theirs)} if cache is None else {"remote": str(theirs), "local": str(cache)}
    read = RetryingStream(adopted=stage.adopted, index_sha256=stage.index_sha256, table=stage.shards, **places)
    return StreamingLAIONDataset(family=FAMILY, image_sizes=[(64, 64)], streams=[read], batch_size=4)


def flipped(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]


NO_ZSTD = "Input data invalid or missing content size in frame header."
DAMAGED = [
    (["sha1"], lambda content: content[: len(content) // 2], "it has {half} bytes, index.json says {size}"),
    ([], lambda content: content[: len(content) // 2], "it has {half} bytes, index.json says {size}"),
    ([], lambda content: bytes(len(content)), f"zstd cannot decompress it: {NO_ZSTD}"),
    (["sha1"], flipped, "its sha1 is {sha1}, that of the stage is {right}"),
]


@pytest.mark.parametrize(("hashes", "damage", "told"), DAMAGED)
def test_zstd_that_stops_in_the_middle_or_is_another_is_fetched_again_and_then_stops_by_name(
    tmp_path, quick, capsys, hashes, damage, told
):
    theirs = write(tmp_path / "theirs", THEIRS, compression="zstd", hashes=hashes)
    assert adopt.main([str(theirs)]) == 0
    packed = sorted(theirs.glob("*.zstd"))[1]
    whole = packed.read_bytes()
    dataset = stream(theirs, tmp_path / "cache")
    packed.write_bytes(bad := damage(whole))
    os.utime(packed)
    first = int(dataset.sample_offset_per_shard[1])
    with pytest.raises(StreamFailure) as error:
        dataset.get_item(first)
    told = told.format(
        half=f"{len(bad):,}", size=f"{len(whole):,}", sha1=get_hash("sha1", bad), right=get_hash("sha1", whole)
    )
    assert str(error.value) == (
        f"data: {theirs}/shard.00001.mds.zstd is damaged: {told}, in 3 tries. Make the stage again, or copy it anew."
    )
    assert capsys.readouterr().err.count("it is fetched again") == 2
    assert not list((tmp_path / "cache").glob("shard.00001*"))  # neither the one nor the other, nor half of it
    packed.write_bytes(whole)
    dataset = stream(theirs, tmp_path / "cache2")
    assert dataset[first]["caption"] == [f"picture number {first}"]


def test_a_shard_that_lies_in_the_cache_of_which_nothing_is_known_is_fetched(tmp_path, quick):
    """Another data set's with shards of the same names, which has no hashes either."""
    theirs, cache = write(tmp_path / "theirs", THEIRS), tmp_path / "cache"
    assert adopt.main([str(theirs)]) == 0
    cache.mkdir()
    whole = (theirs / "shard.00000.mds").read_bytes()
    (cache / "shard.00000.mds").write_bytes(flipped(whole))
    assert stream(theirs, cache)[0]["caption"] == ["picture number 0"]
    assert (cache / "shard.00000.mds").read_bytes() == whole


def test_what_a_killed_run_left_compressed_is_fetched_anew(tmp_path):
    theirs, cache = write(tmp_path / "theirs", THEIRS, compression="gz"), tmp_path / "cache"
    assert adopt.main([str(theirs)]) == 0
    cache.mkdir()
    for name in ("shard.00000.mds.gz", "shard.00001.mds.gz.tmp", "shard.00001.mds.gz.00ff00ff", "shard.00002.mds.tmp"):
        (cache / name).write_bytes(b"half")
    assert len(list(stream(theirs, cache))) == NUM // 4
    assert not [path for path in cache.iterdir() if "gz" in path.name or "tmp" in path.name]


# --- what cannot be adopted ---


def refused(capsys, *words: str, code: int = 2) -> str:
    capsys.readouterr()
    assert adopt.main(list(words)) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said.removesuffix("\n")


def rewrite(theirs: Path, change) -> None:
    index = json.loads((theirs / "index.json").read_text())
    change(index)
    (theirs / "index.json").write_text(json.dumps(index))


def test_what_cannot_be_adopted_is_said(tmp_path, capsys):
    theirs = write(tmp_path / "theirs", {**THEIRS, "id": "int"})
    at, has = f"{theirs}/index.json", "caption (str), id (int), jpg (bytes), width (int32)"
    assert refused(capsys, str(tmp_path / "nowhere")) == (
        f"REMOTE: no folder {tmp_path}/nowhere. Check the path, or make the stage: python -m prepare.shards --help"
    )
    assert refused(capsys, str(theirs), "image=picture", "caption=width").splitlines() == [
        f"image: the data set has no column picture. It has: {has}.",
        "caption: column width is int32. Possible: str, json.",
    ]
    assert refused(capsys, str(theirs), "caption=caption", "key=caption") == (
        "command line: a column is named twice. Each is read as one thing."
    )
    index = (theirs / "index.json").read_text()

    def told(change) -> str:
        (theirs / "index.json").write_text(index)
        rewrite(theirs, change)
        return refused(capsys, str(theirs))

    assert told(lambda index: index.update(version=1)) == (
        f"REMOTE: {at}: version is 1. Possible: 2, a number. {OF_OTHERS}"
    )
    third = lambda index: index["shards"][2]  # noqa: E731
    assert told(lambda index: third(index).update(column_names=["other", "id", "jpg", "width"])) == (
        f"REMOTE: {at}: shards[2], shard.00002.mds, has no column caption. Possible: a column for captions; it has other, "
        f"id, jpg, width. {OF_OTHERS}"
    )
    assert told(lambda index: third(index).update(column_encodings=["json", "int", "bytes", "int32"])) == (
        f"REMOTE: {at}: shards[2], shard.00002.mds: column caption is json. Possible: str, as in shards[0]. {OF_OTHERS}"
    )
    assert told(lambda index: third(index).update(column_encodings=["bytes", "int", "bytes", "int32"])) == (
        f"REMOTE: {at}: shards[2], shard.00002.mds: column caption is bytes. Possible: for captions: str, json. {OF_OTHERS}"
    )
    assert told(lambda index: third(index).update(column_encodings=["pkl", "int", "bytes", "int32"])) == (
        f'REMOTE: {at}: shards[2].column_encodings is ["pkl", "int", "bytes", "int32"]. Possible: encodings of MDS, but none '
        f"that could run code, as pkl. {OF_OTHERS}"
    )
    assert told(lambda index: third(index).update(compression="lzma", zip_data=third(index)["raw_data"])) == (
        f'REMOTE: {at}: shards[2].compression is "lzma". Possible: one of br, bz2, gz, snappy, zstd. {OF_OTHERS}'
    )
    assert told(lambda index: third(index)["raw_data"].update(hashes=None)) == (
        f"REMOTE: {at}: shards[2].raw_data.hashes is null. Possible: an object of names and digests, which may be empty. "
        f"{OF_OTHERS}"
    )
    assert not (theirs / "dataset.json").exists()


def test_columns_that_no_row_can_be_read_from_are_refused(tmp_path, capsys):
    theirs = write(tmp_path / "theirs", {"jpg": "bytes", "caption=alt": "str"}, num=8)
    assert adopt.main([str(theirs)]) == 0
    assert "unusable: 4 of 8 rows (empty caption: 4); see data.max_bad_samples" in capsys.readouterr().out
    nothing = write(tmp_path / "nothing", {"jpg=key": "bytes", "caption": "str"} | {"jpg=jpg": "bytes"}, num=8)
    with MDSWriter(out=str(tmp_path / "none"), columns={"jpg": "bytes", "caption": "str"}) as writer:
        for number in range(8):
            writer.write({"jpg": b"<html>", "caption": f"{number}"})
    assert nothing and refused(capsys, str(tmp_path / "none"), code=1) == (
        f"REMOTE: {tmp_path}/none: none of 8 rows can be used (not an image: 8), read as jpg, caption. Name other columns: "
        f"image=COLUMN caption=COLUMN."
    )


def test_a_stage_of_our_own_and_a_place_that_cannot_be_written_are_refused(tmp_path, stage, capsys):
    assert refused(capsys, str(stage)) == (
        f"{stage}/dataset.json is that of a stage which needs no adoption. Give another REMOTE, or facts=PATH."
    )
    theirs = write(tmp_path / "theirs", THEIRS)
    (tmp_path / "file").touch()
    said = refused(capsys, str(theirs), f"facts={tmp_path}/file/theirs.json", code=1)
    assert said == (
        f"{tmp_path}/file/theirs.json cannot be written: [Errno 17] File exists: '{tmp_path}/file'. Give facts=PATH "
        f"here, and data.facts=PATH to a run."
    )


def test_dataset_json_that_does_not_fit_its_index_is_refused(tmp_path):
    theirs = write(tmp_path / "theirs", THEIRS)
    assert adopt.main([str(theirs)]) == 0

    def told(**facts) -> str:
        own = json.loads((theirs / "dataset.json").read_text())
        (tmp_path / "facts.json").write_text(json.dumps({**own, **facts}))
        with pytest.raises(ValueError) as error:
            read_stage(str(theirs), str(tmp_path / "facts.json"))
        return str(error.value)

    again = f"Adopt the data set again: python -m prepare.adopt {theirs}"
    possible = "Possible: of a stage of images, an object of captions, image and key"
    for columns in ({"image": "jpg"}, {"captions": ["caption"]}, [], {"captions": "caption", "image": "jpg"}):
        assert told(columns=columns) == f"{tmp_path}/facts.json: columns is {json.dumps(columns)}. {possible}. {again}"
    assert told(columns={"image": "jpg", "captions": ["text"]}) == (
        f"{theirs}/index.json: shards[0], shard.00000.mds, has no column text. Possible: a column for captions; it has "
        f"caption, jpg, width. {OF_OTHERS}"
    )
    assert told(index_sha256="0" * 64).endswith(f" that {tmp_path}/facts.json was written for (000000000000). {again}")
    with pytest.raises(ValueError) as error:
        read_stage(str(theirs), str(tmp_path / "none.json"))
    assert str(error.value) == (
        f"no none.json under {tmp_path}. Make the stage: python -m prepare.shards --help. If others have written it: python "
        f"-m prepare.adopt {theirs}"
    )


def test_a_compressed_folder_is_kept_decompressed_where_an_addresss_shards_are(tmp_path, ours, monkeypatch, capsys):
    theirs = write(tmp_path / "theirs", THEIRS, compression="zstd")
    assert adopt.main([str(theirs)]) == 0
    before = tree(theirs)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = DataConfig(remote=str(theirs))
    monkeypatch.chdir(tmp_path)
    link = Path("link")
    link.symlink_to(theirs)
    assert config.problems(8, {}) == [] and config.local == config.sources[0].local
    assert config.local == DataConfig(remote="theirs/").local == StreamConfig(remote="link").local
    assert DataConfig(remote=str(theirs), local="/mine").local == "/mine"
    assert same(epoch(theirs), ours)
    assert f"data.local: not given: the shards of {theirs} are kept in {config.local}" in capsys.readouterr().err
    [cache] = (tmp_path / "cache/easel/stages").iterdir()
    assert str(cache) == config.local and list(cache.glob("*.mds")) and tree(theirs) == before
    told = "Give it as data.remote, and as data.local a folder for its shards."
    assert DataConfig(local=str(theirs)).problems(8, {}) == [
        ("data.local", f"{theirs} is compressed, and nothing is written there. {told}")
    ]


def test_a_folder_without_compression_or_without_an_index_is_read_in_place(tmp_path):
    plain = write(tmp_path / "plain", THEIRS)
    os.mkfifo(tmp_path / "index.json")
    for folder in (plain, tmp_path, tmp_path / "none"):
        assert DataConfig(remote=str(folder)).local is None


# --- from a store ---


def test_many_shards_in_a_store_are_adopted_from_four_of_them(tmp_path, store, monkeypatch, capsys):
    client, variables = store
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    write(tmp_path / "theirs", THEIRS, num=250, size_limit=2 * len(picture(0)), compression="zstd:1")
    for name, content in tree(tmp_path / "theirs").items():
        client.put_object(Bucket="easel", Key=f"adopt/{name}", Body=content)
    asked, download = [], stores.BriefS3Downloader._download_file_impl
    monkeypatch.setattr(
        stores.BriefS3Downloader,
        "_download_file_impl",
        lambda self, remote, *more: asked.append(Path(remote).name) or download(self, remote, *more),
    )
    assert adopt.main(["s3://easel/adopt"]) == 0
    index = json.loads((tmp_path / "theirs/index.json").read_text())["shards"]
    assert len(index) > 100 and len(asked) == 6 and {"index.json", "dataset.json"} < set(asked)
    lines = capsys.readouterr().out.splitlines()
    stage = read_stage("s3://easel/adopt")
    assert stage.num_samples == 250 and lines[0].endswith("shards; zstd:1; no hashes")
    sampled = json.loads(client.get_object(Bucket="easel", Key="adopt/dataset.json")["Body"].read())["sampled"]
    assert sampled["shards"] == 4
    fetched = [shard["zip_data"] for shard in index if shard["zip_data"]["basename"] in asked]
    num_bytes = sum(file["bytes"] for file in fetched) + len((tmp_path / "theirs/index.json").read_bytes())
    read = f"{num_bytes:,} bytes of 4 shards and index.json read in "
    assert lines[-2].startswith(f"s3://easel/adopt/dataset.json written; {read}")
    assert lines[-1] == "composer benchmark.py data.remote=s3://easel/adopt"
    client.delete_object(Bucket="easel", Key="adopt/dataset.json")
    with pytest.raises(ValueError) as error:
        read_stage("s3://easel/adopt")
    assert str(error.value).endswith(" If others have written it: python -m prepare.adopt s3://easel/adopt")


# --- a run, before it starts ---


def test_a_run_goes_on_with_the_columns_that_it_began_with_alone(tmp_path):
    theirs = write(tmp_path / "theirs", {**THEIRS, "alt": "str"})
    identities = []
    for columns in ((), ("caption=alt,caption",)):
        assert adopt.main([str(theirs), *columns]) == 0
        stage = read_stage(str(theirs))
        identities.append(identity_of(RunConfig(), [stage], {}))
    differing = {key for key in identities[0] if identities[0][key] != identities[1][key]}
    assert differing == {"stage.columns"} and "stage.columns" not in identity_of(RunConfig(), [], {})


def test_moments_of_an_adopted_set_are_those_of_a_stage_of_our_own(tmp_path):
    """prepare.latents reads it as a run does."""
    theirs = write(tmp_path / "theirs", {"jpg": "bytes", "several": "json"}, num=6, compression="zstd", size_limit=1000)
    assert adopt.main([str(theirs), "caption=several", f"facts={tmp_path}/facts.json"]) == 0
    ours = write(tmp_path / "ours", {"jpg": "bytes", "caption": "str", "key": "str"}, num=6, hashes=[HASH])
    write_facts(ours, "images", {})
    keys = ["model.preset=tiny", "model.weights=random", "image_size=64", "workers=1", "batch_size=1"]
    assert latents.main([str(theirs), str(tmp_path / "a"), *keys, f"facts={tmp_path}/facts.json"]) == 0
    assert latents.main([str(ours), str(tmp_path / "b"), *keys]) == 0
    one, other = (StreamingDataset(local=str(tmp_path / name), batch_size=1) for name in "ab")
    for number in range(6):
        for name in ("moments", "tokens", "caption"):
            assert np.array_equal(one[number][name], other[number][name])
        assert one[number]["key"] == str(number)
