"""Whole commands as a user types them, in separate processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import TINY_RUN, run, sample_files, tree, write_tar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200, func_only=True)]


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(400, func_only=True)
def test_a_run_streams_from_an_object_store_and_learns_what_a_run_from_the_folder_learns(store, miniature, tmp_path):
    """Two loader workers, a fresh cache each time: no worker may share the parent's connection."""
    client, variables = store
    for name, content in tree(miniature.moments).items():
        client.put_object(Bucket="easel", Key=f"moments/{name}", Body=content)
    more = ["data.workers=2", "global_batch_size=16", "objective.prediction=epsilon", "optimizer.lr=3e-3"]
    more += ["max_duration=60ba", "measure.window_batches=10", "save.every_images=0"]
    of_store = ["data.remote=s3://easel/moments", f"data.local={tmp_path}/cache"]
    for name, address in (("folder", []), ("store", of_store)):
        words = miniature.small(tmp_path, name, *more, *address)
        done = run("composer", "-n", "1", "benchmark.py", *words, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["loss"] for line in metrics(tmp_path / "store")]
    assert losses == [line["loss"] for line in metrics(tmp_path / "folder")] and losses[-1] < 0.6 * losses[0]
    shards = len(list(miniature.moments.rglob("shard.*.mds")))
    assert len(list((tmp_path / "cache").rglob("shard.*.mds"))) == shards > 2
    words = miniature.small(tmp_path, "x", "data.remote=s3://easel/nowhere", f"data.local={tmp_path}/x")
    done = run("python", "benchmark.py", *words, **variables)
    problem = "data.remote: s3://easel/nowhere cannot be read: nothing lies under s3://easel/nowhere;"
    assert done.returncode == 2 and problem in done.stderr, done.stderr


@pytest.mark.long
def test_tensorboard_and_the_log_show_the_losses_of_the_record(tmp_path):
    """No other logger is forced. The launcher and the programs start cold."""
    words = ["--use_synth_data", "loggers.tensorboard.log_dir=null", f"run_folder={tmp_path}", "run_name=logged"]
    done = run("env", "composer", "-n", "1", "benchmark.py", *TINY_RUN, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {".lock", "config.yaml", "environment.json", "metrics.jsonl", "page.html", "starts.jsonl", "summary.json"}
    assert {path.name for path in (tmp_path / "logged").iterdir()} == {*names, "tensorboard"}
    logged = re.findall(r"^train: step (\d+) of .* images, loss ([\d.e+-]+), .* images/s, .* GiB", done.stderr, re.M)
    lines = metrics(tmp_path / "logged")
    assert logged == [(str(line["batch"]), f"{line['loss']:.4g}") for line in lines]
    assert f"run_name: {tmp_path}/logged begins.\n" in done.stderr and "[Gloo]" not in done.stdout + done.stderr
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next((tmp_path / "logged" / "tensorboard").rglob("events.*")).parent))
    events.Reload()
    recorded = [event.value for event in events.Scalars("train/loss")]
    assert recorded == pytest.approx([line["loss"] for line in lines], rel=1e-6)


ORDER_SCRIPT = """
import json, sys, torch, zlib
from common import dist
from data import DataConfig, build_data
from families import load_family

stage, out, workers, epoch, batch_in_epoch = sys.argv[1:]
dist.initialize_dist("cpu", timeout=60.0)
config = DataConfig(local=stage, workers=int(workers), flip=True, crop="random")
batch = 16 // dist.get_world_size()
family, cpu = load_family("sd2", "tiny", "stock"), torch.device("cpu")
loader = build_data(config, family, size=(64, 64), device_batch_size=batch, device=cpu, seed=5).dataloader
if int(epoch):
    loader.resume(int(epoch), int(batch_in_epoch), 16)
epochs = range(3 - int(epoch))
epochs = [[[zlib.crc32(image.numpy().tobytes()) for image in batch["images"]] for batch in loader] for _ in epochs]
with open(f"{out}.{dist.get_global_rank()}", "w") as file:
    json.dump(epochs, file)
"""


@pytest.mark.long
@pytest.mark.timeout(400, func_only=True)
def test_global_batches_are_the_same_on_one_and_two_ranks_and_any_number_of_workers(tmp_path):
    """Elastic order: who reads a sample may change; in which batch of which epoch it comes, and how it is cut, may not."""
    # 47 samples: divisible by neither batches nor ranks, so that padding would show.
    from prepare import shards

    files = {f"{n:09d}": sample_files(n) for n in range(47)}
    stage = tmp_path / "stage"
    assert shards.main([str(write_tar(tmp_path / "in.tar", files)), str(stage), "shard_size=32kb"]) == 0
    script = tmp_path / "order.py"
    script.write_text(ORDER_SCRIPT)
    orders = []
    for ranks, workers, begin in ((1, 0, ("0", "0")), (2, 2, ("0", "0")), (2, 1, ("1", "1"))):
        out = tmp_path / f"order{len(orders)}"
        done = run("composer", "-n", str(ranks), str(script), str(stage), str(out), str(workers), *begin)
        assert done.returncode == 0, done.stdout + done.stderr
        parts = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]
        orders.append(
            [[sorted(sum(batch, [])) for batch in zip(*epoch, strict=True)] for epoch in zip(*parts, strict=True)]
        )
    assert orders[0] == orders[1]
    assert [len(epoch) for epoch in orders[0]] == [2, 2, 2] and orders[0][0] != orders[0][1]
    # Resumed within the second epoch, on another number of ranks than it was begun with.
    assert orders[2] == [orders[0][1][1:], orders[0][2]]
