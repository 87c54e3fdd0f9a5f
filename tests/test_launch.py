"""The files of launch/: what their commands say, on how many GPUs, and what passes signals on.

tests/test_launch_tools.py has them read by their own tools.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
import yaml
from composer.cli import launcher
from conftest import ROOT, started
from test_locks import requirements
from test_yamls import resolve as of_a_recipe

import benchmark
from cli.command_line import parse_command_line
from config import flat, load
from preflight import checks
from preflight.run import quick_problems
from training.run_config import resolve

pytestmark = pytest.mark.timeout(120, func_only=True)

LAUNCH = ROOT / "launch"
MCLOUD = [ROOT / "mcloud.yaml", *sorted(LAUNCH.glob("mcloud_*.yaml"))]
CLOUDS = [*MCLOUD, LAUNCH / "skypilot.yaml", LAUNCH / "kubernetes.yaml"]
SIZES = (8, 32, 256)
BATCH = {"global_batch_size", "device_train_microbatch_size", "data.num_canonical_nodes"}


def content(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def job_of(jobset: dict[str, Any]) -> dict[str, Any]:
    """The one Job of a JobSet."""
    [replicated] = jobset["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def container_of(jobset: dict[str, Any]) -> dict[str, Any]:
    [container] = job_of(jobset)["template"]["spec"]["containers"]
    return container


def commands(path: Path) -> list[list[str]]:
    """The words after `benchmark.py` of each run that a file starts."""
    given = content(path)
    text = given["command"] if "command" in given else given.get("run") or shlex.join(container_of(given)["command"])
    lines = [shlex.split(line.removesuffix("&&")) for line in text.splitlines() if "benchmark.py" in line]
    assert lines
    for words in lines:
        before = words[: words.index("benchmark.py")]
        assert before in (["composer"], ["launch/ranks.sh"], ["exec", "launch/ranks.sh"]), path
    return [words[words.index("benchmark.py") + 1 :] for words in lines]


def read(words: list[str]) -> benchmark.RunConfig:
    return load(benchmark.RunConfig, parse_command_line(words, benchmark.ALIASES), check=lambda config: [])


def test_every_file_that_starts_a_run_is_looked_at():
    starts = {path for path in LAUNCH.glob("*.yaml") if "benchmark.py" in path.read_text()}
    assert starts == {path for path in CLOUDS if path.parent == LAUNCH}


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.name)
def test_a_command_names_a_file_of_yamls_and_repeats_nothing_that_it_says(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for yaml_file, *keys in commands(path):
        assert re.fullmatch(r"yamls/\w+\.yaml", yaml_file) and keys
        there, given = flat(read([yaml_file])), flat(read([yaml_file, *keys]))
        names = [key.partition("=")[0] for key in keys]
        assert [name for name in names if not name.startswith("loggers.") and there[name] == given[name]] == []
        assert len(names) == len(set(names)) and "parameters" not in content(path)


@pytest.mark.usefixtures("quick_estimate")
@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.name)
def test_a_command_passes_the_checks_of_a_run(path, stage, monkeypatch):
    """With a tiny network, and the tests' own data and weights."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(checks, "_check_room", lambda needs: iter(()))  # a small batch has a snapshot to each one
    for words in commands(path):
        config = of_a_recipe(words, stage)
        assert config.data.synthetic == (path.name == "mcloud.yaml") and config.run_name == read(words).run_name


@pytest.mark.parametrize("path", CLOUDS[1:], ids=lambda path: path.name)
def test_a_file_whose_disk_is_not_kept_reads_and_writes_in_a_store_under_a_name(path):
    for words in commands(path):
        keys = dict(word.split("=", 1) for word in words[1:])
        assert keys["data.remote"].startswith("s3://YOUR_BUCKET/") and keys["data.local"].startswith(("/", "$HOME/"))
        if path.name != "mcloud_streaming.yaml":  # a measurement of some minutes
            assert keys["save.remote"].startswith("s3://YOUR_BUCKET/") and keys["run_name"]


@pytest.mark.parametrize("gpus", SIZES)
@pytest.mark.parametrize("path", MCLOUD, ids=lambda path: path.name)
def test_each_size_of_a_job_divides_the_batch_and_the_order_of_samples(path, gpus, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # by another test's run: variables count
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for words in commands(path):
        found = quick_problems(resolve(read(words)), [])
        assert [problem.text for problem in found if BATCH & {*problem.keys}] == []


def test_a_size_that_divides_nothing_would_be_seen(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # by another test's run: variables count
    monkeypatch.setenv("WORLD_SIZE", "24")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found = quick_problems(resolve(read(commands(MCLOUD[0])[0])), [])
    assert [problem for problem in found if BATCH & {*problem.keys}]


# --- MosaicML's platform ---


def finalized(path: Path, **compute: int) -> dict[str, Any]:
    """What `mcli run` would send, made by its own classes, up to the call of their service."""
    from mcli import RunConfig
    from mcli.models.run_config import FinalRunConfig

    config = RunConfig.from_file(str(path))
    config.compute.update(compute)  # as its --gpus does
    return FinalRunConfig.finalize_config(config).to_create_run_api_input()["runInput"]


@pytest.mark.parametrize("path", MCLOUD, ids=lambda path: path.name)
def test_mosaicmls_own_classes_accept_each_of_their_files(path):
    sent = finalized(path, gpus=256)
    assert sent["runName"] == content(path)["name"] and sent["compute"]["gpus"] == 256
    [integration] = sent["integrations"]
    assert integration["type"] == "git_repo" and "gitCommit" in str(integration)
    assert sent["command"] == content(path)["command"].strip()
    is_long = "save.remote" in sent["command"]
    assert sent.get("scheduling", {}).get("preemptible", False) == is_long
    assert not is_long or sent["scheduling"]["maxRetries"] > 0


@pytest.mark.parametrize("line", ["platform: r1z1", "scheduling: {resume: true}", "compute: {gpu: 8}"])
def test_mosaicmls_own_classes_would_refuse_an_unknown_key(tmp_path, line):
    path = tmp_path / "mcloud.yaml"
    path.write_text(re.sub(r"^compute:(\n  .*)+", "", (ROOT / "mcloud.yaml").read_text(), flags=re.M) + line + "\n")
    with pytest.raises(UserWarning, match=re.findall(r"\w+", line)[-2 if "{" in line else 0]):
        finalized(path)


def test_the_stages_of_the_recipe_are_run_one_after_the_other():
    """The second begins where the first has ended, and a stage that has not ended stops the job."""
    first, second = commands(LAUNCH / "mcloud_two_stages.yaml")
    assert [words[0] for words in (first, second)] == ["yamls/mosaicml_256.yaml", "yamls/mosaicml_512.yaml"]
    begins = Path(read([second[0]]).model.denoiser)
    assert begins.name == dict(word.split("=", 1) for word in first[1:])["run_name"]
    lines = content(LAUNCH / "mcloud_two_stages.yaml")["command"].splitlines()
    assert [line.endswith("&&") for line in lines if "benchmark.py" in line] == [True, False]


# --- Kubernetes and SkyPilot: what Composer's launcher is told ---

TOLD = {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}


def test_the_variables_are_those_that_composers_launcher_reads():
    text = Path(launcher.__file__).read_text()
    assert all(f"os.environ['{name}']" in text or f"'{name}' in os.environ" in text for name in TOLD)


def test_the_pods_of_the_jobset_know_their_rank_and_each_other():
    jobset = content(LAUNCH / "kubernetes.yaml")
    job, container = job_of(jobset), container_of(jobset)
    told = {variable["name"]: variable for variable in container["env"]}
    assert told.keys() == TOLD
    gpus, nodes = container["resources"]["limits"]["nvidia.com/gpu"], job["completions"]
    assert nodes == job["parallelism"] and job["completionMode"] == "Indexed"
    assert int(told["LOCAL_WORLD_SIZE"]["value"]) == gpus and int(told["WORLD_SIZE"]["value"]) == gpus * nodes
    name, [replicated] = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    assert (
        told["MASTER_ADDR"]["value"] == f"{name}-{replicated['name']}-0-0.{name}"
    )  # JobSet: JOBSET-JOB-INDEX-POD.SUBDOMAIN


def test_a_pod_that_is_taken_away_does_not_count_and_a_run_that_cannot_work_is_not_tried_again():
    """By the words of Kubernetes' Job controller, to which JobSet applies its patterns."""
    jobset = content(LAUNCH / "kubernetes.yaml")
    of_pods, failure = job_of(jobset)["podFailurePolicy"]["rules"], jobset["spec"]["failurePolicy"]

    def action(index: int) -> str:
        message = (
            f"Container ranks for pod default/easel failed with exit code 1 matching FailJob rule at index {index}"
        )
        return next(
            rule["action"]
            for rule in failure["rules"]
            if any(re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"])
        )

    expected = {"2": "FailJobSet", "138, 143": "RestartJobSetAndIgnoreMaxRestarts", "DisruptionTarget": None}
    for index, rule in enumerate(of_pods):
        codes = ", ".join(map(str, rule.get("onExitCodes", {}).get("values", ())))
        what = codes or rule["onPodConditions"][0]["type"]
        assert action(index) == (expected[what] or expected["138, 143"])
    assert len(of_pods) == 3 and job_of(jobset)["backoffLimit"] == 0 and failure["maxRestarts"] > 0
    assert {128 + signal.SIGUSR1, 128 + signal.SIGTERM} == {138, 143}
    assert content(LAUNCH / "skypilot.yaml")["resources"]["job_recovery"]["recover_on_exit_codes"] == [138, 143]


def test_the_nodes_of_skypilot_know_their_rank_and_each_other(tmp_path):
    """The script itself is run, with SkyPilot's variables, up to the launch."""
    given = content(LAUNCH / "skypilot.yaml")
    script = re.sub(r"^exec launch/ranks.sh .*", "env", given["run"], flags=re.M)
    (tmp_path / "easel-venv/bin").mkdir(parents=True)
    (tmp_path / "easel-venv/bin/activate").touch()  # what its setup makes
    sky = {"NODE_RANK": "1", "NODE_IPS": "10.0.0.7\n10.0.0.9", "NUM_NODES": "2", "NUM_GPUS_PER_NODE": "8"}
    variables = {f"SKYPILOT_{name}": value for name, value in sky.items()} | {"HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-euc", script], env={**os.environ, **variables}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    told = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.partition("=")[0] in TOLD)
    assert told == {
        "LOCAL_WORLD_SIZE": "8",
        "WORLD_SIZE": "16",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "29400",
    }
    assert given["num_nodes"] == 2 and given["setup"].strip() == "launch/install.sh ~/easel-venv"


# --- launch/ranks.sh ---

RANK = """
import os, pathlib, signal, sys, time
here, number, name = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] + "-" + os.environ["RANK"]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(number, lambda *_: ((here / f"heard-{name}").touch(), os._exit(128 + number)))
(here / f"ready-{name}").touch()
while True:
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.timeout(400, func_only=True)
def test_a_signal_to_the_job_reaches_every_rank_and_their_exit_code_is_that_of_the_job(tmp_path, monkeypatch):
    """With Composer's own launcher, which would leave its ranks alone or kill them. What Ctrl-C sends comes as SIGTERM.

    It sends SIGTERM to the ranks that have not ended yet, which is left unheard here.
    """
    for name in TOLD:  # what runs in the tests' own process have set
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "rank.py").write_text(RANK)
    hears = {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1, signal.SIGINT: signal.SIGTERM}
    own = {"RANKS_PER_NODE": "2", "SLURM_JOB_ID": ""}
    with contextlib.ExitStack() as stack:
        jobs = {}
        for number, heard in hears.items():
            job = ["launch/ranks.sh", f"{tmp_path}/rank.py", str(tmp_path), str(int(heard)), number.name]
            jobs[number] = stack.enter_context(started(*job, output=subprocess.PIPE, **own))
        end = time.monotonic() + 250
        while len(list(tmp_path.glob("ready-*"))) < 6 and time.monotonic() < end:
            time.sleep(0.1)
        for number, process in jobs.items():
            process.send_signal(number)
        assert {number: process.wait(timeout=100) for number, process in jobs.items()} == {15: 143, 10: 138, 2: 143}
    assert {path.name for path in tmp_path.glob("heard-*")} == {f"heard-{n.name}-{r}" for n in hears for r in (0, 1)}


# --- containers ---


def test_the_images_are_made_by_the_install_script_and_that_of_amd_says_that_it_was_never_built():
    for name, words in (("Dockerfile", "launch/install.sh /opt/easel"), ("Dockerfile.rocm", "launch/install.sh rocm")):
        text = (LAUNCH / name).read_text()
        assert re.findall(r"^RUN (.*)", text, re.M) == [words]
    assert "never built" in text.split("FROM")[0]
    assert "make env VENV=" in (LAUNCH / "install.sh").read_text()
    [torch] = [asked for asked in requirements("requirements.txt") if asked.name == "torch"]
    assert torch.specifier.contains(re.search(r"pytorch_release_([\d.]+)$", text, re.M)[1])


def test_on_amds_image_all_of_the_lock_is_installed_but_torch_and_what_is_cudas():
    [left_out] = re.findall(r"grep -vE '(.*)' requirements.lock", (LAUNCH / "install.sh").read_text())
    names = [pin.name for pin in requirements("requirements.lock")]
    kept = [
        pin.name for pin in requirements("requirements.lock") if not re.search(left_out, f"{pin}".replace(";", " ;"))
    ]
    gone = {*names} - {*kept}
    assert {"torch", "torchvision", "triton", "xformers"} < gone and not [n for n in kept if re.match("nvidia|cuda", n)]
    assert {name for name in gone if not re.match("nvidia|cuda", name)} == {
        "torch",
        "torchvision",
        "triton",
        "xformers",
    }
    assert {"torchmetrics", "torch-optimizer", "mosaicml", "wandb"} <= {*kept}


def test_the_install_script_says_which_words_it_takes():
    done = subprocess.run([LAUNCH / "install.sh"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (
        2,
        "launch/install.sh: 0 words given. Possible: one, the folder of the environment or rocm. "
        "Run: launch/install.sh /opt/easel\n",
    )


def said_by_make(*words: str) -> list[str]:
    command = ["make", "--no-print-directory", "-n", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.replace("\\\n", " ").splitlines() if line.startswith("docker ")]


NO_DAEMON = re.compile("annot connect to the Docker daemon|failed to connect to the docker API|unknown server OS")


@pytest.mark.parametrize(
    ("target", "gpu"),
    [
        *(("build_and_launch_docker", gpu) for gpu in ("nvidia", "amd", "none")),
        ("exec_docker", "nvidia"),
        ("stop_docker", "nvidia"),
    ],
)
def test_dockers_own_client_takes_the_words_of_the_makefile(target, gpu, tmp_path):
    """Up to its daemon, of which there is none: a flag that it does not know, it refuses before."""
    if shutil.which("docker") is None:
        pytest.skip("Docker's client is not installed")
    lines = said_by_make(target, f"GPU={gpu}")
    assert len(lines) == (2 if target == "build_and_launch_docker" else 1)
    for line in lines:
        (tmp_path / "launch").mkdir(exist_ok=True)
        for name in ("Dockerfile", "Dockerfile.rocm"):
            (tmp_path / "launch" / name).write_text("FROM scratch\n")
        nowhere = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none"}
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=nowhere, capture_output=True, text=True, timeout=60
        )
        assert done.returncode != 0 and NO_DAEMON.search(done.stderr), done.stderr
    devices = {"nvidia": "--gpus all", "amd": "--device /dev/kfd", "none": "-e CUDA_VISIBLE_DEVICES= "}
    if "launch" in target:
        assert devices[gpu] in lines[-1] and "--ipc=host" in lines[-1]
    if "build" in target:
        assert ("Dockerfile.rocm" in lines[0]) == (gpu == "amd")


def test_an_unknown_kind_of_gpu_is_refused():
    command = ["make", "--no-print-directory", "-n", "launch_docker", "GPU=intel"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "GPU: 'intel'. Possible: nvidia, amd, none." in done.stderr
