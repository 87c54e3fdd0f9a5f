"""launch/ on a real Slurm: two nodes on this machine, in namespaces (tests/cluster/slurm_two_nodes.sh).

Skipped, with the reason, where Debian's packages or the right to make namespaces are missing. Those that train run by hand:
make test-cluster.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_checkpoints import newest, same_training

from run_folder.files import METRICS, SUMMARY, read_lines
from tests.cluster.slurm import Cluster, missing, process_of, two_nodes

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


@pytest.mark.slow
def test_a_container_without_an_image_or_without_pyxis_is_refused(cluster):
    """Pyxis cannot be had here, so that a container itself was never started."""
    given = dict(script="launch/slurm_container.sbatch")
    assert cluster.refused(["yamls/shapes.yaml"], "--nodes=1", **given) == (
        "slurm: CONT is not given. Possible: docker://REGISTRY/IMAGE:TAG, or the path of a .sqsh file. Give CONT=... "
        "before sbatch.\n"
    )
    said = cluster.refused(["yamls/shapes.yaml"], "--nodes=1", **given, CONT="easel.sqsh")
    assert said.startswith("slurm: srun of this cluster has no --container-image: Pyxis is not installed.")


@pytest.mark.slow
def test_a_job_without_requeue_says_what_that_means_and_a_folder_of_one_node_is_refused(cluster):
    said = cluster.refused(*both(["yamls/shapes.yaml"], "--no-requeue"), LOGDIR="/dev/shm/logs")
    text = "this job was submitted without --requeue: when a node is lost, a rank dies or the time is up it ends"
    assert text in said and re.search(r"no run_name is given: it is slurm-\d+\n", said)
    assert re.search(
        r"node2: /dev/shm/logs/\d+ is not seen here, but on the first node. Wanted: a folder that all", said
    )


# --- runs ---

OWN = ["global_batch_size=32", "measure.window_batches=1", "save.every_images=64", "save.keep=99", "max_duration=12ba"]


def words_of(miniature, folder: Path, name: str, *more: str) -> list[str]:
    """A run of 12 batches, with a checkpoint after every second one, whose data goes through one loader worker a rank."""
    return miniature.small(folder, name, *OWN, "data.workers=1", "data.num_canonical_nodes=2", *more)


@pytest.fixture(scope="module")
def whole(cluster, miniature, tmp_path_factory) -> Path:
    """The unbroken run on two nodes."""
    folder = tmp_path_factory.mktemp("whole")
    cluster.completed(*both(words_of(miniature, folder, "whole")))
    return folder


def said_of_restarted(cluster: Cluster, job: str) -> str:
    """It comes back and ends. More than once on a busy machine: Slurm resends what a node was too slow to answer."""
    end = cluster.end_of(job)
    assert end["JobState"] == "COMPLETED" and int(end["Restarts"]) >= 1, cluster.all_said(job)
    return cluster.said(job)


def submit_and_kill(
    cluster: Cluster, words: list[str], folder: Path, at: int, what: str, node: str, **more: str
) -> str:
    """Submit a job, and kill a rank or a launcher when it has trained so many batches."""
    job = cluster.submit(*both([SLOW, "0", str(at), *words]), **more)
    cluster.until(job, lambda: cluster.batches(job) == at)
    process_of(f"run_folder={folder} ", what, node).send_signal(signal.SIGKILL)
    return job


def check_same(folder: Path, name: str, whole: Path) -> None:
    """Weights, batches of the record: those of the unbroken run."""
    assert same_training(newest(folder, name), newest(whole, "whole"))
    assert [line["batch"] for line in read_lines(folder / name / METRICS)] == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.cluster
def test_short_a_job_on_two_nodes_trains_and_leaves_its_result_and_what_each_rank_has_said(
    cluster, miniature, tmp_path
):
    job = cluster.completed(*both(miniature.small(tmp_path, "a", "data.workers=1")))
    assert (cluster.job(job)["ExitCode"], cluster.job(job)["Restarts"]) == ("0:0", "0"), cluster.all_said(job)
    assert re.search(r"^images_per_sec=.* batches=4 ", cluster.said(job), re.M)
    assert json.loads((tmp_path / "a" / SUMMARY).read_text())["num_devices"] == 2
    assert (cluster.logs / job / "rank1.txt").is_file()
    starts = [line["at"] for line in cluster.times(job)]
    assert starts[:2] == ["job", "step"] and sorted(starts[2:4]) == ["launcher", "launcher"] and starts[-1] == "ended"


class TestRuns:
    pytestmark = trains

    def test_a_cancelled_job_saves_and_the_same_command_resumes_to_the_same_weights(
        self, cluster, miniature, tmp_path, whole
    ):
        words = words_of(miniature, tmp_path, "a", "save.every_images=320000")
        job = cluster.submit(*both([SLOW, "0", "5", *words]))
        cluster.until(job, lambda: cluster.batches(job) == 5)
        cluster.at("scancel", job)
        end = cluster.end_of(job)
        assert (end["JobState"], end["Restarts"]) == ("CANCELLED", "0"), cluster.all_said(job)
        cluster.wait_until_idle()  # a job that was cancelled ends its processes first
        assert "SIGTERM: stopped after batch 5; saved " in cluster.said(job)
        assert "ended by SIGTERM: a cancel, a preemption or a requeue." in cluster.said(job)
        assert "resumes from batch 5, " in cluster.said(cluster.completed(*both(words)))
        check_same(tmp_path, "a", whole)

    def test_at_the_time_limit_a_job_saves_goes_back_into_the_queue_and_ends_with_the_same_weights(
        self, cluster, miniature, tmp_path, whole
    ):
        words = words_of(miniature, tmp_path, "a", "save.every_images=320000")
        job = cluster.submit(*both([SLOW, "0", "5", *words], "--time=6", "--signal=B:USR1@30"))
        said = said_of_restarted(cluster, job)
        assert "SIGUSR1: stopped after batch 5; saved " in said and "resumes from batch 5, " in said
        assert "stopped before its time limit, code " in said and "; the job is put into the queue again" in said
        check_same(tmp_path, "a", whole)

    @pytest.mark.parametrize("what", ["rank", "launcher"])
    def test_a_rank_or_a_launcher_that_is_killed_is_started_again_by_the_job_itself(
        self, cluster, miniature, tmp_path, whole, what
    ):
        job = submit_and_kill(cluster, words_of(miniature, tmp_path, "a"), tmp_path, 5, what, "node2")
        assert "resumes from batch 4, " in said_of_restarted(cluster, job)
        check_same(tmp_path, "a", whole)

    def test_the_number_of_restarts_is_bounded(self, cluster, miniature, tmp_path):
        words = words_of(miniature, tmp_path, "a")
        job = submit_and_kill(cluster, words, tmp_path, 3, "rank", "node1", MAX_RESTARTS="0")
        end = cluster.end_of(job)
        assert (end["JobState"], end["Restarts"]) == ("FAILED", "0"), cluster.all_said(job)
        assert "not started again: MAX_RESTARTS=0. The same sbatch command resumes the run." in cluster.said(job)

    @pytest.mark.parametrize("node", ["node1", "node2"])
    def test_a_job_survives_the_loss_of_a_node_and_ends_with_the_same_weights(
        self, cluster, miniature, tmp_path, whole, node
    ):
        """Slurm finds out by itself, after SlurmdTimeout."""
        job = cluster.submit(*both([SLOW, "0", "3", *words_of(miniature, tmp_path, "a")]))
        cluster.until(job, lambda: cluster.batches(job) == 3)
        cluster.lose(node)
        try:
            cluster.until(job, lambda: cluster.job(job)["JobState"] == "PENDING")
        finally:
            cluster.revive(node)
        assert "resumes from batch 2, " in said_of_restarted(cluster, job)
        check_same(tmp_path, "a", whole)
