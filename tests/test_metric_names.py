"""run_folder/metric_names.py: what loggers are sent, read back from W&B's offline file and from TensorBoard's."""

# ruff: noqa: F811  (fixtures of another file)

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
from composer import Logger, Timestamp
from composer.loggers import LoggerDestination
from conftest import ROOT, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_validation import held_out, made  # noqa: F401
from wandb_file import offline

from reports import wandb_dashboard
from run_folder.files import read_summary
from run_folder.history import rounded
from run_folder.metric_names import METRICS, SAMPLES, VIDEOS, alert, as_sent, bins_named, row_of, streams_named
from training.loggers import TensorboardLogger

OFFLINE = ["loggers.wandb.project=p", "loggers.wandb.mode=offline"]


def test_composers_metrics_are_sent_under_our_names_or_not_at_all():
    given = {"loss/train/total": 0.5, "time/sample": 16, "time/sample_in_epoch": 16, "val/loss_t300": 1.0}
    given |= {"trainer/device_train_microbatch_size": 8, "metrics/train/x": 1.0, "time/train_sec": 2.0}
    sent = {"train/batch_loss": 0.5, "progress/images": 16, "val/loss_t300": 1.0, "time/train_sec": 2.0}
    assert as_sent(given) == sent


def test_a_stream_may_be_called_anything():
    names = ["a?b", "a*b", "..", "laion-5b.x", "ü \x1b/c"]
    sent = streams_named({"streams": {name: {"samples": number, "loss": None} for number, name in enumerate(names)}})
    assert list(sent) == [f"streams/{name}/samples" for name in ("0-a_b", "1-a_b", "_", "laion-5b.x", "____c")]
    assert as_sent(sent) == sent and streams_named({}) == {}


def test_bins_are_named_by_their_first_timestep():
    assert bins_named([0.5, None, 0.25, 1.0]) == {"val/loss_t000": 0.5, "val/loss_t500": 0.25, "val/loss_t750": 1.0}


def test_the_page_names_every_metric_once_and_the_dashboard_names_no_other():
    table = (ROOT / "docs/metrics.md").read_text().partition("## The metrics")[2].partition("\n\nA metric without")[0]
    assert sorted(re.findall(r"`(\w+/\w+(?:/\w+)?)`", table)) == sorted(row.metric for row in METRICS)
    named = set(wandb_dashboard.metrics())
    assert {name for name in named if row_of(name) is None} == set() and len(named) > 25


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_a_run_logs_what_the_table_has_and_what_the_dashboard_shows(miniature, held_out, tmp_path):
    """Two streams, one with an odd name, validation, grids, an evaluation that meets its target; then the files are read."""
    odd, folder = tmp_path / "odd name", tmp_path / "one"
    (made(tmp_path / "other", "num_images=40", "captions=shuffled") / "moments").rename(odd)
    parts = ", ".join(f"{{remote: {place}, proportion: 0.5}}" for place in (miniature.moments, odd))
    words = miniature.small(tmp_path, "one", f"validation.remote={held_out / 'moments'}", "validation.every_images=16")
    words = [word for word in words if not word.startswith(("data.remote", "eval.when", "target.fid"))]
    words += ["data.remote=null", f"data.streams=[{parts}]", "eval.when=in_training", "eval.every_images=16"]
    words += ["target.fid=1e9", *OFFLINE, "loggers.tensorboard={}", "loggers.group=seeds", "optimizer.lr=1.25e-5"]
    done = run(sys.executable, "benchmark.py", *words, "measure.warmup_batches=0")
    assert done.returncode == 0 and "target=reached" in done.stdout, done.stdout + done.stderr

    logged, summary = offline(folder), read_summary(folder)
    # tests/test_moving_shapes.py has a run that logs the first, tests/test_cmmd.py computes the second, and
    # tests/test_health.py has a run of several ranks.
    elsewhere = {VIDEOS, "eval/cmmd", *(row.metric for row in METRICS if row.metric.startswith("ranks/"))}
    table, shown = ({row.metric for row in METRICS} - elsewhere, set(wandb_dashboard.metrics()) - elsewhere)
    assert {row_of(name) for name in logged.names()} == table
    assert {name for name in shown if name not in logged.names() and "NAME" not in name} == set()
    assert {"streams/moments/loss", "streams/odd_name/samples", "result/images_to_target"} <= logged.names()
    assert [row["progress/images"] for row in logged.history if "eval/fid" in row] == [16]
    unplaced = {name for row in logged.history for name in row if "progress/images" not in row}
    assert unplaced <= {"_step", "_timestamp", "_runtime"}
    assert logged.summary["result/target"] == "reached" and logged.summary["result/fid"] == rounded(summary["fid"])
    assert logged.group == "seeds" and logged.config["optimizer"]["lr"] == 1.25e-5
    [(title, text, level)] = logged.alerts
    assert (title, level) == ("target reached", "WARN") and text.startswith("reached with FID ")
    assert list((folder / "wandb").rglob("*.png"))

    [path] = (folder / "tensorboard").rglob("events*")
    events = EventAccumulator(str(path)).Reload()
    tags = {tag for kind in ("scalars", "images") for tag in events.Tags()[kind] if not tag.startswith("_hparams_")}
    assert tags == logged.names() - {"result/target"} and events.Images(SAMPLES)[-1].step == 2
    started = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"optimizer.lr" in started and b"result/target" in started


def test_an_alert_shows_no_secret_and_skips_a_logger_without_alerts():
    alerts, destination = [], LoggerDestination()
    destination.alert = lambda *said: alerts.append(said)
    alert([object(), LoggerDestination(), destination], "title", "s3://key:secret@bucket/x is away")
    assert alerts == [("title", "s3://key:***@bucket/x is away")]


def test_a_start_has_one_file_of_tensorboards_however_often_it_is_flushed(tmp_path):
    """Composer begins a new one every 100 batches: 29 of one start were seen."""
    destination, state = TensorboardLogger(log_dir=str(tmp_path)), SimpleNamespace(run_name="a", timestamp=Timestamp())
    destination.init(state, Logger(state))
    for batch in range(250):
        destination.writer.add_scalar("loss", batch, batch)
        state.timestamp = state.timestamp.to_next_batch()
        destination.batch_end(state, None)
    destination.log_result({"target": "none", "loss": 0.5})
    destination.close(state, None)
    [path] = tmp_path.rglob("events*")
    assert len(EventAccumulator(str(path)).Reload().Scalars("loss")) == 250
