"""Refused starts: their messages, exit code 2, and that they leave no files."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import wandb
from conftest import ROOT, TINY_RUN, tree
from filelock import FileLock

import benchmark
from cli import errors
from cli.errors import ConfigError
from preflight import checks
from prepare import encoder
from record.checkpoint_files import FULL, listed
from stages.fetch import StreamFailure
from training import loggers
from training.device import build_device, missing_gpus
from training.loggers import LoggersConfig, WandbConfig, wandb_mode

pytestmark = pytest.mark.timeout(90, func_only=True)

SYNTHETIC = [*TINY_RUN, "--use_synth_data"]


def everything(folder: Path) -> dict[str, bytes | None]:
    """Files and folders below: path -> content, None for a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def refused(capsys, *words: str, code: int = 2) -> str:
    assert benchmark.main(list(words)) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


# --- no folder is left ---


def test_a_cache_that_is_in_use_is_refused_and_leaves_no_folder(miniature, tmp_path, capsys):
    cache = tmp_path / "cache"
    cache.mkdir()
    words = miniature.small(tmp_path / "runs" / "deep", "a", f"data.local={cache}")
    with FileLock(cache / ".in_use"):
        before = everything(tmp_path)
        said = refused(capsys, *words, code=1)  # a new start may find the other run ended
        assert everything(tmp_path) == before
    assert said.endswith(
        f"data.local: {cache} is in use by another run on this machine. Give each run a folder of its own, or wait for the "
        f"other one.\n"
    )


def late_refusals() -> dict[str, tuple[str, Exception]]:
    """Where in a start something is found out after the run's folder was taken, and as what."""
    return {
        "build_networks": ValueError("model.weights: they do not fit. Take others."),
        "build_batches": StreamFailure("data: s3://b/index.json is away."),
        "build_learning": OSError(28, "No space left on device"),
        "build_mlperf_log": ValueError("mlperf.enabled: its log cannot be read. Fix it."),
        "build_trainer": SystemExit(143),
    }


@pytest.mark.parametrize("place", late_refusals())
def test_whatever_ends_a_start_no_run_folder_stays(miniature, tmp_path, capsys, monkeypatch, place):
    """As the library of each place does it. A cache that was begun by then stays: the next start goes on from it."""
    error = late_refusals()[place]

    def fails(*arguments, **more):
        raise error

    monkeypatch.setattr(benchmark, place, fails)
    words = miniature.small(tmp_path / "runs", "a", f"data.local={tmp_path}/caches/a")
    code = benchmark.main(words)
    assert code == {ValueError: 2, StreamFailure: 1, OSError: 1, SystemExit: 143}[type(error)]
    assert not (tmp_path / "runs").exists()
    assert "Traceback" not in capsys.readouterr().err


def test_a_begun_runs_folder_stays_as_it_was(miniature, tmp_path, capsys, monkeypatch):
    words = miniature.small(tmp_path, "a", "save.every_images=8", "max_duration=2ba")
    assert benchmark.main(words) == 0 and listed(tmp_path / "a" / "checkpoints", FULL)
    (tmp_path / "a" / ".lock").unlink()  # as a run of an older version
    before = tree(tmp_path)
    capsys.readouterr()

    def fails(*arguments, **more):
        raise ValueError("objective: no such thing. Take another.")

    monkeypatch.setattr(benchmark, "build_learning", fails)
    assert refused(capsys, *words, "max_duration=4ba") == "objective: no such thing. Take another.\n"
    assert tree(tmp_path) == before


# --- loggers ---


@pytest.fixture
def wandb_at(tmp_path, monkeypatch):
    """Say where W&B's server is, and with which key."""

    def at(address: str, key: str | None) -> LoggersConfig:
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))  # none of this user's
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        if key is not None:
            monkeypatch.setenv("WANDB_API_KEY", key)
        return LoggersConfig(wandb=WandbConfig(project="p"))

    return at


NO_GPU = (
    "devices: there is no GPU here, but NVIDIA_VISIBLE_DEVICES=all asks for some. Was the container started without --gpus "
    "all? Start it with that (the host needs NVIDIA's container toolkit), in a pod with a limit of nvidia.com/gpu; or say "
    "CUDA_VISIBLE_DEVICES= to run on the CPU."
)


def test_a_container_without_its_gpus_says_so_in_one_line(monkeypatch, tmp_path, capsys):
    """A run for GPUs and one for a CPU, the doctor, and what else asks for the device."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for words in (["yamls/sd2_512_synthetic.yaml"], SYNTHETIC):
        assert refused(capsys, *words, f"run_folder={tmp_path}/runs") == f"{NO_GPU}\n"
    assert everything(tmp_path) == {}
    found = next(checks.check_devices(1))
    assert (found.level, f"devices: {found.text}") == ("error", NO_GPU)
    for build in (build_device, encoder.build_device):
        with pytest.raises(ConfigError, match=r"^devices: there is no GPU here"):
            build("fp32")


@pytest.mark.parametrize(
    ("variables", "hip", "said"),
    [
        ({}, None, None),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, None, None),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, None, None),
        ({"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": ""}, None, None),
        ({"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": "0"}, None, "started without --gpus all?"),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-8a4b"}, None, "NVIDIA_VISIBLE_DEVICES=GPU-8a4b asks for some."),
        ({}, "7.2", "started without its devices? Start it with --device /dev/kfd"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "7.2", None),
    ],
)
def test_what_says_that_gpus_are_wanted(monkeypatch, variables, hip, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", hip)
    for name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    text = missing_gpus()
    assert text is None if said is None else said in (text or "")


def test_without_a_login_at_wandb_the_run_logs_offline_and_says_so(wandb_at, tmp_path, capsys, monkeypatch):
    """As in a cloud's job whose secret is missing; an empty key is none. No server is asked."""
    monkeypatch.setattr(loggers, "_refusal", lambda *given: pytest.fail("asked"))
    for key in (None, ""):
        config = wandb_at("https://api.wandb.ai", key)
        assert (config.problems(), wandb_mode(config, Path("runs/a"))) == ([], "offline")
        assert capsys.readouterr().err == (
            "loggers.wandb: https://api.wandb.ai is not asked: this machine has no login there (WANDB_API_KEY is not set): "
            "logged offline. Send it with wandb sync runs/a/wandb/offline-run-*\n"
        )
    wandb_at("https://wandb.example.org:8443/base/", "k" * 40)
    assert LoggersConfig(wandb=WandbConfig(project="p")).problems() == []
    wandb_at("https://api.wandb.ai", None)
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {4 * '1234567890'}\n")
    assert loggers._wandb_login() == ("https://api.wandb.ai", 4 * "1234567890")


def test_the_server_and_the_key_of_wandbs_own_files_count(wandb_at, tmp_path, monkeypatch):
    """`wandb login --host` writes the server into the user's file, and the key into netrc."""
    wandb_at("", None)
    monkeypatch.delenv("WANDB_BASE_URL")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    assert loggers._wandb_login() == (wandb.Settings().base_url, None)
    (tmp_path / "settings").write_text("[default]\nbase_url = https://wandb.example.org/\n")
    (tmp_path / "netrc").write_text(f"machine wandb.example.org login user password {8 * '12345'}\n")
    assert loggers._wandb_login() == ("https://wandb.example.org", 8 * "12345")


NOT_VALID = (
    "loggers.wandb: W&B's settings are not valid (not shown, there may be a key in them). Set WANDB_BASE_URL to https://HOST "
    "and WANDB_API_KEY to a key, or neither, and run `wandb login`.\n"
)


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_an_address_of_wandb_that_is_none_or_has_a_key_in_it_is_refused(wandb_at, mode):
    none = [
        "nonsense",
        "",
        "localhost:8080",
        "ftp://x",
        "http://",
        "http://h:99999",
        "https://[::1",
        "https://wandb.ai",
    ]
    none += ["https://x/?token=SECRET", "https://x ", "k" * 40]
    none += ["https://user:SECRET@host", "user:SECRET@host", "https://SECRET@host", "https://user:SE/CRET@host"]
    for address in none:
        wandb_at(address, "k" * 40)
        [(key, said)] = LoggersConfig(wandb=WandbConfig(project="p", mode=mode)).problems()
        assert f"{key}: {said}\n" == NOT_VALID, address


@pytest.mark.parametrize("given", [40 * "\u043a", 20 * "k" + "\n" + 20 * "k"])
def test_a_key_of_wandb_that_no_request_can_have_is_refused_unseen(wandb_at, given):
    wandb_at("https://wandb.ai.example", given)
    [(key, said)] = LoggersConfig(wandb=WandbConfig(project="p")).problems()
    assert f"{key}: {said}\n" == NOT_VALID


@pytest.mark.parametrize("address", ["nonsense", "https://user:SECRET@host"])
def test_and_that_before_anything_starts(wandb_at, tmp_path, capsys, address):
    wandb_at(address, "k" * 40)
    assert refused(capsys, *SYNTHETIC, "--wandb_project", "p", f"run_folder={tmp_path}/runs") == NOT_VALID
    assert everything(tmp_path) == {}


@pytest.mark.parametrize(("status", "mode"), [(200, "online"), (503, "offline"), (401, None)])
def test_what_the_server_of_wandb_answers_decides(wandb_at, capsys, status, mode):
    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/graphql" and "Authorization" in self.headers
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        config = wandb_at(address, "k" * 40)
        if mode is None:
            with pytest.raises(ConfigError) as error:
                wandb_mode(config, Path("runs/a"))
            assert str(error.value) == (
                f"loggers.wandb: {address} does not take this machine's login. Run `wandb login --relogin`, correct "
                f"WANDB_API_KEY, or say loggers.wandb.mode=offline."
            )
        else:
            assert wandb_mode(config, Path("runs/a")) == mode
        server.shutdown()
    later = "logged offline. Send it with wandb sync runs/a/wandb/offline-run-*\n"
    said = {503: f"loggers.wandb: {address} answers with 503: {later}"}
    assert capsys.readouterr().err == said.get(status, "")


def test_a_server_that_says_nothing_is_waited_for_some_seconds_only(wandb_at, capsys, monkeypatch):
    monkeypatch.setattr(loggers, "SERVER_SEC", 0.3)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        config, began = wandb_at(f"http://127.0.0.1:{mute.getsockname()[1]}", "k" * 40), time.monotonic()
        assert wandb_mode(config, Path("runs/a")) == "offline" and time.monotonic() - began < 10.0
    assert " logged offline. Send it with wandb sync runs/a/wandb/offline-run-*\n" in capsys.readouterr().err


def test_a_log_folder_that_cannot_be_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    words = [*SYNTHETIC, f"run_folder={tmp_path}/runs", "run_name=a"]
    said = refused(capsys, *words, f"loggers.tensorboard.log_dir={tmp_path}/file/logs")
    assert said == (
        f"loggers.tensorboard.log_dir: {tmp_path}/file/logs/a cannot be written: {tmp_path}/file: Not a directory. Give a "
        f"folder that this user may write in.\n"
    )


# --- shared memory ---


def test_too_little_shared_memory_is_refused_with_the_figure(miniature, tmp_path, capsys):
    """A real one: no machine has that much of it."""
    words = miniature.small(tmp_path, "a", "data.workers=4", f"data.local={tmp_path}/c", f"global_batch_size={10**9}")
    said = [line for line in refused(capsys, *words).splitlines() if line.startswith("/dev/shm: ")]
    assert len(said) == 1 and re.fullmatch(
        r"/dev/shm: 14 batches of [\d.e+]+ GiB: [\d.e+]+ GiB there; [\d.e+]+ GiB, [\d.e+]+ free\. A worker would die of "
        r"a bus error\. Enlarge it \(docker run --shm-size=16g or --ipc=host, mount -o remount,size=16g /dev/shm\), or lower "
        r"data\.workers\.",
        said[0],
    )
    assert everything(tmp_path) == {}
    enough = refused(capsys, *miniature.small(tmp_path, "a", "data.workers=0", f"global_batch_size={10**9}"))
    assert "/dev/shm" not in enough


# --- what is foreseen ---


def own_error(kind: type[Exception], text: str) -> None:
    raise kind(text)


class Killed(torch.utils.data.Dataset):
    """Its worker is ended from outside."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return number


def test_a_loader_worker_that_the_kernel_ends_is_foreseen():
    with pytest.raises(RuntimeError) as caught:
        next(iter(torch.utils.data.DataLoader(Killed(), num_workers=1)))
    assert errors.is_foreseen(caught.value) and re.fullmatch(
        r"DataLoader worker \(pid(\(s\))? \d+\) (is killed by signal: Killed\.|exited unexpectedly) Too little memory or "
        r"/dev/shm ends a worker so\. Lower data\.workers, or give more of it\. The same command resumes from the last "
        r"checkpoint\.",
        errors.text_of(caught.value).replace("  ", " "),
    )


def test_a_rank_that_never_comes_is_foreseen():
    """As gloo says it, of a collective in which another rank is stopped."""
    error = RuntimeError(
        "[x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete"
    )
    assert errors.is_foreseen(error) and errors.text_of(error) == (
        f"{error} Another rank has not come to where this one waits for it: it hangs, or its machine is away. "
        "The same command resumes from the last checkpoint."
    )


@pytest.mark.parametrize(
    ("work", "is_foreseen", "text"),
    [
        (lambda: own_error(ValueError, "loss: nan. Lower it."), True, "loss: nan. Lower it."),
        (lambda: own_error(StreamFailure, "data: away."), True, "data: away."),
        (
            lambda: Path("/dev/null/x").read_bytes(),
            True,
            "NotADirectoryError: [Errno 20] Not a directory: '/dev/null/x'",
        ),
        (lambda: wandb.init(project="a/b", mode="offline"), True, "UsageError: "),
        (lambda: int("x"), False, "ValueError: invalid literal for int() with base 10: 'x'"),
        (lambda: json.loads("x"), False, "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (lambda: own_error(AssertionError, "never"), False, "AssertionError: never"),
    ],
)
def test_what_is_foreseen_prints_its_message_alone_and_a_defect_its_trace(work, is_foreseen, text, capsys):
    with pytest.raises(Exception) as caught:
        work()
    errors.tell(caught.value, debug=False)
    said = capsys.readouterr().err
    assert said.startswith(text if is_foreseen else "Traceback (most recent call last):\n")
    assert said.splitlines()[-1].startswith(text)
    errors.tell(caught.value, debug=True)
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):\n")
