"""launch/ on a real Slurm: two nodes on this machine, in namespaces (tests/cluster/slurm_two_nodes.sh).

Skipped, with the reason, where Debian's packages or the right to make namespaces are missing. Those that train run by hand:
make test-cluster.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from test_checkpoints import newest, same_training

from run_folder.files import METRICS, SUMMARY, read_lines
from tests.cluster.__main__ import process_of
from tests.cluster.slurm import Cluster, missing, two_nodes

WHY_NOT = missing()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no Slurm of two nodes: {WHY_NOT}"),
    pytest.mark.timeout(2400, func_only=True),
]
trains = [pytest.mark.slow, pytest.mark.cluster]

SLOW = "tests/cluster/slow_ranks.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_nodes(tmp_path_factory.mktemp("cluster")) as made:
        yield made


def both(words: list[str], *options: str) -> tuple[list[str], str, str]:
    """The arguments of a job on both nodes."""
    return words, "--nodes=2", *options


# --- what needs no training ---


def test_a_container_without_an_image_or_without_pyxis_is_refused(cluster):
    """Pyxis cannot be had here, so that a container itself was never started."""
    words, script = ["yamls/shapes.yaml"], "launch/slurm_container.sbatch"
    job = cluster.submit(words, "--nodes=1", script=script)
    assert cluster.end_of(job)["ExitCode"] == "2:0"
    assert cluster.said(job) == (
        "slurm: CONT is not given. Possible: docker://REGISTRY/IMAGE:TAG, or the path of a .sqsh file. Give CONT=... "
        "before sbatch.\n"
    )
    job = cluster.submit(words, "--nodes=1", script=script, CONT="easel.sqsh")
    assert cluster.end_of(job)["ExitCode"] == "2:0"
    assert cluster.said(job).startswith("slurm: srun of this cluster has no --container-image: Pyxis is not installed.")


def test_a_job_without_requeue_says_what_that_means_and_a_folder_of_one_node_is_refused(cluster):
    job = cluster.submit(*both(["yamls/shapes.yaml"], "--no-requeue"), LOGDIR="/dev/shm/logs")
    assert cluster.end_of(job)["ExitCode"] == "2:0"
    said = cluster.said(job)
    assert (
        "this job was submitted without --requeue: when a node is lost, a rank dies or the time is up it ends" in said
    )
    assert f"no run_name is given: it is slurm-{job}\n" in said
    assert f"node2: /dev/shm/logs/{job} is not seen here, but on the first node. Wanted: a folder that all" in said


# --- runs ---

OWN = ["global_batch_size=32", "measure.window_batches=1", "save.every_images=64", "save.keep=99", "max_duration=12ba"]


def words_of(miniature, folder: Path, name: str, *more: str) -> list[str]:
    """A run of 12 batches, with a checkpoint after every second one, whose data goes through one loader worker a rank."""
    return miniature.small(folder, name, *OWN, "data.workers=1", "data.num_canonical_nodes=2", *more)


@pytest.fixture(scope="module")
def whole(cluster, miniature, tmp_path_factory) -> Path:
    """The unbroken run on two nodes."""
    folder = tmp_path_factory.mktemp("whole")
    job = cluster.submit(*both(words_of(miniature, folder, "whole")))
    assert cluster.end_of(job)["JobState"] == "COMPLETED", cluster.all_said(job)
    return folder


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    """Moments of 64 pictures that the miniature's training has not."""
    from prepare import latents, shapes, shards

    folder = tmp_path_factory.mktemp("held-out")
    tars, images, moments = (str(folder / name) for name in ("tars", "images", "moments"))
    assert shapes.main([tars, "num_images=64", "part=reference"]) == 0
    assert shards.main([tars, images]) == 0
    assert latents.main([images, moments, "model.family=shapes", "image_size=32"]) == 0
    return folder / "moments"


def scored_words(miniature, folder: Path, held_out: Path, *more: str) -> list[str]:
    """That run with its held-out loss after every second batch."""
    own = [f"validation.remote={held_out}", "validation.every_images=64", "ema.decay=0.5"]
    return words_of(miniature, folder, "a", *own, *more)


@pytest.fixture(scope="module")
def scores(cluster, miniature, held_out, tmp_path_factory) -> list[float]:
    """The unbroken run's held-out loss, at its beginning and after every second batch."""
    folder = tmp_path_factory.mktemp("scores")
    job = cluster.submit(*both(scored_words(miniature, folder, held_out)))
    assert cluster.end_of(job)["JobState"] == "COMPLETED", cluster.all_said(job)
    return [line["val_loss"] for line in read_lines(folder / "a" / METRICS) if line.get("validation")]


def check_restarted(cluster: Cluster, job: str, end: dict[str, str]) -> None:
    """It came back and ended. More than once on a busy machine: Slurm resends what a node was too slow to answer."""
    assert end["JobState"] == "COMPLETED" and int(end["Restarts"]) >= 1, cluster.all_said(job)


def check_same(folder: Path, name: str, whole: Path) -> None:
    """Weights, batches of the record: those of the unbroken run."""
    assert same_training(newest(folder, name), newest(whole, "whole"))
    assert [line["batch"] for line in read_lines(folder / name / METRICS)] == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.cluster
def test_short_a_job_on_two_nodes_trains_and_leaves_its_result_and_what_each_rank_has_said(
    cluster, miniature, tmp_path
):
    job = cluster.submit(*both(miniature.small(tmp_path, "a", "data.workers=1")))
    end = cluster.end_of(job)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "0"), cluster.all_said(job)
    assert re.search(r"^images_per_sec=.* batches=4 ", cluster.said(job), re.M)
    assert json.loads((tmp_path / "a" / SUMMARY).read_text())["num_devices"] == 2
    assert (cluster.logs / job / "rank1.txt").is_file()
    starts = [line["at"] for line in cluster.times(job)]
    assert starts[:2] == ["job", "step"] and sorted(starts[2:4]) == ["launcher", "launcher"] and starts[-1] == "ended"


class TestRuns:
    pytestmark = trains

    def test_scores_of_two_nodes_are_those_of_one_process(self, cluster, miniature, tmp_path, whole):
        """Each rank draws its part of the prompts."""
        found = {}
        for nodes in (2, 1):
            out = f"out={tmp_path}/{nodes}"
            words = ["eval.py", str(whole / "whole"), "snapshots=last", "eval.batch_size=16", out]
            job = cluster.submit(words, f"--nodes={nodes}")
            assert cluster.end_of(job)["JobState"] == "COMPLETED", cluster.all_said(job)
            [line] = [json.loads(line) for line in (tmp_path / str(nodes) / "eval.jsonl").read_text().splitlines()]
            found[nodes] = line["fid"], line["clip"]
        assert found[2] == pytest.approx(found[1], rel=1e-5)

    def test_a_batch_that_two_nodes_cannot_share_is_refused_and_not_started_again(self, cluster, miniature, tmp_path):
        job = cluster.submit(*both(miniature.small(tmp_path, "a", "global_batch_size=9")))
        end = cluster.end_of(job)
        assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", "2:0", "0"), cluster.all_said(job)
        said = cluster.said(job)
        assert "global_batch_size: 9 is not a multiple of 2 ranks x 1 microbatch = 2. Nearest: 8, 10.\n" in said
        assert "refused: the configuration cannot run" in said and not (tmp_path / "a").exists()

    def test_a_run_folder_that_one_node_alone_has_is_refused(self, cluster, miniature):
        job = cluster.submit(*both(words_of(miniature, Path("/dev/shm/runs"), "a")))
        assert cluster.end_of(job)["ExitCode"] == "2:0", cluster.all_said(job)
        text = "run_folder: node2 does not see what node1 has written into /dev/shm/runs/a. Wanted: a folder that all"
        assert text in cluster.said(job)
        assert "runs" not in cluster.at("ls", "/dev/shm", where="node1").split()

    def test_a_cancelled_job_saves_and_the_same_command_resumes_to_the_same_weights(
        self, cluster, miniature, tmp_path, whole
    ):
        words = words_of(miniature, tmp_path, "a", "save.every_images=320000")
        job = cluster.submit(*both([SLOW, "0", "5", *words]))
        cluster.until(job, lambda: cluster.batches(job) == 5)
        cluster.at("scancel", job)
        end = cluster.end_of(job)
        assert (end["JobState"], end["Restarts"]) == ("CANCELLED", "0"), cluster.all_said(job)
        cluster_is_idle(cluster)
        assert "SIGTERM: stopped after batch 5; saved " in cluster.said(job)
        assert "ended by SIGTERM: a cancel, a preemption or a requeue." in cluster.said(job)
        job = cluster.submit(*both(words))
        assert cluster.end_of(job)["JobState"] == "COMPLETED", cluster.all_said(job)
        assert "resumes from batch 5, " in cluster.said(job)
        check_same(tmp_path, "a", whole)

    def test_at_the_time_limit_a_job_saves_goes_back_into_the_queue_and_ends_with_the_same_weights(
        self, cluster, miniature, tmp_path, whole
    ):
        words = words_of(miniature, tmp_path, "a", "save.every_images=320000")
        job = cluster.submit(*both([SLOW, "0", "5", *words], "--time=6", "--signal=B:USR1@30"))
        end = cluster.end_of(job)
        check_restarted(cluster, job, end)
        said = cluster.said(job)
        assert "SIGUSR1: stopped after batch 5; saved " in said and "resumes from batch 5, " in said
        assert "stopped before its time limit, code " in said and "; the job is put into the queue again" in said
        check_same(tmp_path, "a", whole)

    @pytest.mark.parametrize("what", ["rank", "launcher"])
    def test_a_rank_or_a_launcher_that_is_killed_is_started_again_by_the_job_itself(
        self, cluster, miniature, tmp_path, whole, what
    ):
        words = words_of(miniature, tmp_path, "a")
        job = cluster.submit(*both([SLOW, "0", "5", *words]))
        cluster.until(job, lambda: cluster.batches(job) == 5)
        process_of(f"run_folder={tmp_path} ", what, "node2").send_signal(signal.SIGKILL)
        end = cluster.end_of(job)
        check_restarted(cluster, job, end)
        assert "resumes from batch 4, " in cluster.said(job)
        check_same(tmp_path, "a", whole)

    def test_the_number_of_restarts_is_bounded(self, cluster, miniature, tmp_path):
        words = words_of(miniature, tmp_path, "a")
        job = cluster.submit(*both([SLOW, "0", "3", *words]), MAX_RESTARTS="0")
        cluster.until(job, lambda: cluster.batches(job) == 3)
        process_of(f"run_folder={tmp_path} ", "rank", "node1").send_signal(signal.SIGKILL)
        end = cluster.end_of(job)
        assert (end["JobState"], end["Restarts"]) == ("FAILED", "0"), cluster.all_said(job)
        assert "not started again: MAX_RESTARTS=0. The same sbatch command resumes the run." in cluster.said(job)

    @pytest.mark.parametrize("node", ["node1", "node2"])
    def test_a_job_survives_the_loss_of_a_node_and_reaches_its_target_where_the_unbroken_run_does(
        self, cluster, miniature, tmp_path, held_out, scores, node
    ):
        """Slurm finds out by itself, after SlurmdTimeout. The target is a held-out loss that is reached after that."""
        at = next(n for n in range(3, len(scores)) if scores[n] < min(scores[:n]))  # the first is before training
        words = scored_words(miniature, tmp_path, held_out, f"target.val_loss={scores[at]!r}")
        job = cluster.submit(*both([SLOW, "0", "3", *words]))
        cluster.until(job, lambda: cluster.batches(job) == 3)
        cluster.lose(node)
        try:
            cluster.until(job, lambda: cluster.job(job)["JobState"] == "PENDING")
        finally:
            cluster.revive(node)
        end = cluster.end_of(job)
        check_restarted(cluster, job, end)
        assert "resumes from batch 2, " in cluster.said(job)
        summary = json.loads((tmp_path / "a" / SUMMARY).read_text())
        assert (summary["target"], summary["images_to_target"]) == ("reached", 64 * at)
        lines = read_lines(tmp_path / "a" / METRICS)
        assert [line["val_loss"] for line in lines if line.get("validation")] == scores[: at + 1]
        batches = [line["batch"] for line in lines if "loss" in line]
        assert batches == list(range(1, 2 * at + 1))

    def test_two_jobs_of_one_node_share_a_cache_folder_and_each_survives_the_others_end(
        self, cluster, miniature, tmp_path, whole
    ):
        one, cache = ("--nodes=1", "--nodelist=node1", "--cpus-per-task=1"), f"data.local={tmp_path / 'cache'}"
        words = {name: [SLOW, "0.5", "0", *words_of(miniature, tmp_path, name, cache)] for name in "ab"}
        before = cluster.at("ls", "/dev/shm", where="node1")
        jobs = {name: cluster.submit(words[name], *one, MAX_RESTARTS="0") for name in "ab"}
        for job in jobs.values():
            cluster.until(job, lambda job=job: cluster.batches(job) >= 2)
        assert cluster.at("ls", "/dev/shm", where="node1") == before
        process_of("run_name=b ", "rank", "node1").send_signal(signal.SIGKILL)
        assert cluster.end_of(jobs["b"])["JobState"] == "FAILED"
        again = cluster.submit(words["b"], *one)
        for job in (jobs["a"], again):
            assert cluster.end_of(job)["JobState"] == "COMPLETED", cluster.all_said(job)
        assert same_training(newest(tmp_path, "a"), newest(tmp_path, "b"))
        assert cluster.at("ls", "/dev/shm", where="node1") == before
        assert {path.name for path in miniature.moments.glob("*.mds")} <= {
            p.name for p in (tmp_path / "cache").iterdir()
        }

    def test_an_mlperf_submissions_variables_run_the_miniature_to_its_result(self, cluster, miniature, tmp_path):
        """launch/config_CPU_02x01x16.sh, and the data and scores of the tests."""
        script = "source launch/config_CPU_02x01x16.sh && env | grep -E '^(DGX|BATCHSIZE|WALLTIME|YAML)'"
        said = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
        variables = dict(line.split("=", 1) for line in said.stdout.splitlines())
        words = miniature.words(tmp_path, "unused", "max_duration=6ba", "eval.every_images=96", "save.every_images=96")
        keys = [word for word in words if "=" in word and not word.startswith(("run_name=", "run_folder="))]
        options = f"--nodes={variables['DGXNNODES']}", f"--time={variables['WALLTIME']}"
        job = cluster.submit(["launch/run_and_time.sh", *keys], *options, NEMOLOGS=str(tmp_path), SEED="7", **variables)
        assert cluster.end_of(job)["JobState"] == "COMPLETED", cluster.all_said(job)
        assert re.search(r"^RESULT,stable_diffusion,\d+,root,", cluster.said(job), re.M)
        summary = json.loads((tmp_path / "mlperf-7" / SUMMARY).read_text())
        assert (summary["num_devices"], summary["global_batch_size"], summary["batches"]) == (2, 32, 6)
        assert '"value": "CPU_02x01x16"' in (tmp_path / "mlperf-7" / "mlperf.log").read_text()


def cluster_is_idle(cluster: Cluster, limit_sec: float = 900.0) -> None:
    """Wait until no job is left in the queue: one that was cancelled ends its processes first."""
    end = time.monotonic() + limit_sec
    while cluster.at("squeue", "--noheader").strip():
        assert time.monotonic() < end
        time.sleep(0.5)
