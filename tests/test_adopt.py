"""Third-party datasets: prepare.adopt, and what a run reads of them, against plain streaming's own writer."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import picture, tree
from PIL import Image
from streaming import MDSWriter, StreamingDataset
from streaming.base.hashing import get_hash

import data
from config import flatten
from data import DataConfig, StreamingLAIONDataset, build_data
from families import load_family
from mds import fetch, stores
from mds.adopted import AdoptedColumns
from mds.cache import MARK_FILE, STATE_FILE
from mds.dataset import read_dataset, write_metadata
from mds.fetch import HASH, RetryingStream, StreamFailure
from prepare import adopt
from training.config import RunConfig
from training.start import identity_of

FAMILY = load_family("sd2", "tiny", "stock")
CPU = torch.device("cpu")
THIRD_PARTY = "It is a third-party dataset: copy it again, or rewrite it with streaming's MDSWriter."
NUM = 24


def row(number: int) -> dict:
    jpg, caption = picture(number), f"picture number {number}"
    image, alt = Image.open(io.BytesIO(jpg)).convert("RGB"), "" if number % 2 else f"alternative {number}"
    several, names = [caption, f"number {number} again"], {"id": 1000 + number, "key": f"{number:03d}"}
    return names | {
        "jpg": jpg,
        "image": image,
        "caption": caption,
        "several": several,
        "alt": alt,
        "width": 80,
        "text": b"<",
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
    """The batches of a dataset of our own, of the same pictures and captions in shards of as many."""
    columns = {"jpg": "bytes", "caption": "str", "key": "str"}
    out = write(tmp_path_factory.mktemp("ours") / "stage", columns, hashes=[HASH])
    write_metadata(out, "images", {})
    return epoch(out)


# --- reading ---


@pytest.mark.parametrize(
    ("compression", "hashes"),
    [("zstd", ["sha1"]), ("gz", ["md5", "xxh64"]), ("br:3", []), ("bz2", []), ("snappy", []), (None, ["blake2b"])],
)
def test_batches_are_those_of_a_stage_of_our_own_however_shards_are_packed(tmp_path, ours, compression, hashes):
    theirs, cache = write(tmp_path / "theirs", THEIRS, compression=compression, hashes=hashes), tmp_path / "cache"
    before = tree(theirs)
    assert adopt.main([str(theirs)]) == 0
    assert {name: content for name, content in tree(theirs).items() if name != "dataset.json"} == before
    assert same(epoch(theirs, cache), ours)
    raw = {shard["raw_data"]["basename"] for shard in json.loads(before["index.json"])["shards"]}
    assert {path.name for path in cache.iterdir()} - {MARK_FILE, STATE_FILE} == raw | {"index.json"}
    assert same(epoch(theirs, cache, workers=2 if hashes else 0), ours)  # from the cache, by digest or size


def test_encodings_of_images_and_names_of_columns(tmp_path):
    for image, caption, key in (
        ("image=image:pil", "text=caption:str", None),
        ("IMAGE=image:png", "prompt=caption:str", None),
        ("image=image:jpeg", "captions=several:json", "__key__=id:int"),
    ):
        columns = dict(column.split(":") for column in (image, caption, key) if column)
        theirs = write(tmp_path / caption.partition("=")[0], columns)
        assert adopt.main([str(theirs)]) == 0
        plain, dataset = StreamingDataset(local=str(theirs), batch_size=1), stream(theirs, None)
        for number in (0, NUM - 1):
            sample, pixels = dataset[number], plain[number][image.partition("=")[0]].convert("RGB")
            assert np.array_equal(data.decode_image(sample["jpg"]).permute(1, 2, 0), np.asarray(pixels))
            several = row(number)["several"]
            assert sample["caption"] == (several if "several" in caption else several[:1])
            assert sample["key"] == (str(1000 + number) if key else str(number))
            assert dataset.read_good_sample(number)["caption"] in sample["caption"]


# --- what is damaged ---


def stream(theirs: Path, cache: Path | None) -> StreamingLAIONDataset:
    stage = read_dataset(str(theirs))
    places = {"local": str(theirs)} if cache is None else {"remote": str(theirs), "local": str(cache)}
    read = RetryingStream(adopted=stage.adopted, index_sha256=stage.index_sha256, table=stage.shards, **places)
    return StreamingLAIONDataset(family=FAMILY, image_sizes=[(64, 64)], streams=[read], batch_size=4)


def flipped(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("hashes", "damage", "message"),
    [
        ([], lambda content: content[: len(content) // 2], "it has {bad}, index.json says {whole}"),
        ([], lambda content: bytes(len(content)), "zstd cannot decompress it: Input data invalid or missing content "),
        (["sha1"], flipped, "its sha1 is {sha1}, that of the dataset is {right}"),
    ],
)
def test_a_damaged_compressed_shard_is_fetched_again_and_then_named(
    tmp_path, monkeypatch, capsys, hashes, damage, message
):
    monkeypatch.setattr(fetch, "RETRY_WAITS_SEC", (0.0, 0.0))
    theirs = write(tmp_path / "theirs", THEIRS, compression="zstd", hashes=hashes)
    assert adopt.main([str(theirs)]) == 0
    packed = sorted(theirs.glob("*.zstd"))[1]
    whole, dataset = packed.read_bytes(), stream(theirs, tmp_path / "cache")
    packed.write_bytes(bad := damage(whole))
    first = dataset.shards[0].samples
    with pytest.raises(StreamFailure) as error:
        dataset[first]
    digests = {"sha1": get_hash("sha1", bad), "right": get_hash("sha1", whole)}
    message = message.format(bad=f"{len(bad):,} bytes", whole=f"{len(whole):,}", **digests)
    assert str(error.value).startswith(f"data: {theirs}/shard.00001.mds.zstd is damaged: {message}")
    assert str(error.value).endswith(", in 3 tries. Rebuild the dataset, or copy it again.")
    assert capsys.readouterr().err.count("it is fetched again") == 2
    assert not list((tmp_path / "cache").glob("shard.00001*"))  # neither of them, nor half of one


# --- what cannot be adopted ---


def test_a_dataset_that_cannot_be_adopted_is_refused(tmp_path, capsys, stage):
    def refusal(*words: object) -> str:
        capsys.readouterr()
        assert adopt.main(list(map(str, words))) == 2
        return capsys.readouterr().err.removesuffix("\n")

    theirs = write(tmp_path / "theirs", {**THEIRS, "id": "int"})
    assert refusal(theirs, "image=picture", "caption=width").splitlines() == [
        "image: the dataset has no column picture. It has: caption (str), id (int), jpg (bytes), width (int32).",
        "caption: column width is int32. Possible: str, json.",
    ]
    assert "a column is named twice" in refusal(theirs, "caption=caption", "key=caption")
    assert "needs no adoption" in refusal(stage)
    whole = json.loads((theirs / "index.json").read_text())
    for changes, message in (
        ({"column_names": ["other", "id", "jpg", "width"]}, ", shard.00002.mds, has no column caption. Possible: a "),
        ({"column_encodings": ["bytes", "int", "bytes", "int32"]}, ", shard.00002.mds: column caption is bytes. "),
        ({"compression": "lzma", "zip_data": whole["shards"][2]["raw_data"]}, '.compression is "lzma". Possible: '),
    ):
        shards = [shard | (changes if number == 2 else {}) for number, shard in enumerate(whole["shards"])]
        (theirs / "index.json").write_text(json.dumps({**whole, "shards": shards}))
        text = refusal(theirs)
        assert text.startswith(f"REMOTE: {theirs}/index.json: shards[2]{message}") and text.endswith(THIRD_PARTY)
    assert not (theirs / "dataset.json").exists()


def test_dataset_json_that_does_not_fit_its_index_is_refused(tmp_path):
    theirs, facts = write(tmp_path / "theirs", THEIRS), tmp_path / "facts.json"
    assert adopt.main([str(theirs)]) == 0
    for changes, message in (
        ({"columns": {"image": "jpg"}}, f"{facts}: columns is "),
        (
            {"columns": {"image": "jpg", "captions": ["text"]}},
            f"{theirs}/index.json: shards[0], shard.00000.mds, has no ",
        ),
        ({"index_sha256": "0" * 64}, f"{theirs}/index.json (sha256 "),
    ):
        facts.write_text(json.dumps({**json.loads((theirs / "dataset.json").read_text()), **changes}))
        with pytest.raises(ValueError) as error:
            read_dataset(str(theirs), str(facts))
        assert str(error.value).startswith(message)
    with pytest.raises(ValueError, match=f"If others have written it: python -m prepare.adopt {theirs}$"):
        read_dataset(str(theirs), str(tmp_path / "none.json"))


def test_a_compressed_folder_is_kept_decompressed_in_the_cache(tmp_path, ours, monkeypatch, capsys):
    theirs = write(tmp_path / "theirs", THEIRS, compression="zstd")
    assert adopt.main([str(theirs)]) == 0
    before = tree(theirs)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = DataConfig(remote=str(theirs))
    assert config.problems(8, {}) == [] and config.local == config.sources[0].local
    assert same(epoch(theirs), ours)
    assert f"data.local: not given: the shards of {theirs} are kept in {config.local}" in capsys.readouterr().err
    [cache] = (tmp_path / "cache/easel/datasets").iterdir()
    assert str(cache) == config.local and list(cache.glob("*.mds")) and tree(theirs) == before
    [(where, text)] = DataConfig(local=str(theirs)).problems(8, {})
    assert where == "data.local" and text.startswith(f"{theirs} is compressed, and nothing is written there. ")
    assert DataConfig(remote=str(write(tmp_path / "plain", THEIRS))).local is None  # it is read in place


# --- from a store ---


@pytest.mark.slow
def test_many_shards_in_a_store_are_adopted_from_four_of_them(tmp_path, in_store, monkeypatch, capsys):
    folder = write(tmp_path / "theirs", THEIRS, num=250, size_limit=2 * len(picture(0)), compression="zstd:1")
    remote = in_store(folder, "adopt")
    asked, download = [], stores.S3Client.download

    def counted(self, remote, *more):
        asked.append(Path(remote).name)
        return download(self, remote, *more)

    monkeypatch.setattr(stores.S3Client, "download", counted)
    assert adopt.main([remote]) == 0
    assert len(list(folder.glob("*.zstd"))) > 100 and len(asked) == 6 and {"index.json", "dataset.json"} < set(asked)
    lines = capsys.readouterr().out.splitlines()
    assert read_dataset(remote).num_samples == 250 and lines[-1] == f"composer benchmark.py data.remote={remote}"


# --- a run, before it starts ---


def test_a_run_resumes_with_the_columns_that_it_started_with_only(tmp_path):
    theirs = write(tmp_path / "theirs", {**THEIRS, "alt": "str", "several": "json"})
    identities = []
    for words in ((), ("caption=alt,several",)):
        assert adopt.main([str(theirs), *words]) == 0
        stage = read_dataset(str(theirs))
        identities.append(identity_of(flatten(RunConfig()), [stage], {}, denoiser_start=None))
    differing = {key for key in identities[0] if identities[0][key] != identities[1][key]}
    synthetic = identity_of(flatten(RunConfig()), [], {}, denoiser_start=None)
    assert differing == {"stage.columns"} and "stage.columns" not in synthetic
    assert stage.adopted == AdoptedColumns(captions=("alt", "several"), image="jpg")
    dataset = stream(theirs, None)
    assert data.read_captions(dataset[2]) == ["alternative 2", "picture number 2", "number 2 again"]
    assert data.read_captions(dataset[3]) == ["picture number 3", "number 3 again"]  # an empty caption is left out
