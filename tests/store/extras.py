"""Beside the faults: whole runs from a stage that was made in the store, and one read over SFTP.

    python -m tests.store.extras train FOLDER [swift | moto]

The runs are a command of their own, with a store of their own, so that they can go on beside the faults, most of which are
spent waiting. Its last line is the result as JSON. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.store.dataset import NUM_SAMPLES
from tests.store.faults import EARLY, GRACE_SEC, PLAIN_STALL_SEC, Skipped
from tests.store.reader_outcomes import RIGHT, ROOT, Nursery, Reading, judge
from tests.store.server import BUCKET, Store, end, free_ports, wait_until_open

COMMAND_SEC = 240.0
TRAIN_AWAY_SEC = 20.0  # longer than what was fetched ahead lasts, on a busy machine too
NUM_IMAGES, GLOBAL_BATCH = 320, 4  # 80 batches; the workers read 64 samples ahead of 320
NUM_BATCHES = NUM_IMAGES // GLOBAL_BATCH
TRAINING = [
    "model.preset=tiny",
    "model.weights=random",
    "image_size=64",
    f"global_batch_size={GLOBAL_BATCH}",
    "max_duration=1ep",
    "data.stage=moments",
    "data.workers=2",
    "data.shuffle=false",  # in order the shards are fetched bit by bit, and not all at once
    "measure.window_batches=4",
    "measure.warmup_batches=4",
    "loggers.progress_bar=false",
]
SFTP_SERVER = Path("/usr/sbin/sshd")


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def command(log: Path, store: Store, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in the project's root that reads from the store; what is left of it at the end is killed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    variables |= store.environment()
    with open(log, "wb") as file:
        process = subprocess.Popen(
            words, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # composer's launcher ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def complete(log: Path, store: Store, *words: str) -> None:
    """Run a command to its end. Raises RuntimeError: it failed."""
    with command(log, store, *words) as process:
        code = process.wait(COMMAND_SEC)
    if code:
        raise RuntimeError(f"{' '.join(words)} ended with {code}: {log.read_text(errors='replace')[-2000:]}")


def run_words(home: Path, name: str) -> tuple[str, ...]:
    """Return the command of a run of two ranks."""
    stage = [f"data.remote=s3://{BUCKET}/train/moments", f"data.local={home / name}-cache"]
    return ("composer", "-n", "2", "benchmark.py", *TRAINING, *stage, f"run_folder={home}", f"run_name={name}")


def windows(home: Path, name: str) -> list[dict[str, Any]]:
    """Return the whole lines of a run's metrics.jsonl."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return [json.loads(line) for line in (home / name / "metrics.jsonl").read_text().splitlines()]
    return []


def run_with_the_store_stopped(store: Store, home: Path) -> tuple[int | None, int]:
    """Run with the store away for some seconds in mid-epoch; return the exit code, and the batch at which it went."""
    with command(home / "with.log", store, *run_words(home, "with")) as process:
        deadline, at = time.monotonic() + COMMAND_SEC, 0
        while at < EARLY * NUM_BATCHES and process.poll() is None and time.monotonic() < deadline:
            at = max((line["batch"] for line in windows(home, "with")), default=0)
            time.sleep(0.02)
        try:
            store.stop()
            time.sleep(TRAIN_AWAY_SEC)
        finally:
            store.heal()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(COMMAND_SEC)
        code = process.poll()
    return code, at


def train(store: Store, home: Path) -> dict[str, Any]:
    """Make both stages in the store, train from them, and again with the store stopped in mid-epoch for some seconds."""
    started = time.monotonic()
    python, address = sys.executable, f"s3://{BUCKET}/train"
    tars, images, moments = str(home / "tars"), f"{address}/images", f"{address}/moments"
    tiny = ["model.preset=tiny", "model.weights=random", "image_size=64"]
    complete(
        home / "shapes.log", store, python, "-m", "prepare.shapes", tars, f"num_images={NUM_IMAGES}", "image_size=64"
    )
    complete(home / "shards.log", store, python, "-m", "prepare.shards", tars, images, "shard_size=8kb")
    complete(home / "latents.log", store, python, "-m", "prepare.latents", images, moments, *tiny, "shard_size=8kb")
    shards = sum(key.endswith(".mds") for key in store.keys("train/moments/"))

    complete(home / "without.log", store, *run_words(home, "without"))

    code, stopped_at = run_with_the_store_stopped(store, home)

    both = {"without_fault": windows(home, "without"), "stopped_in_mid_epoch": windows(home, "with")}
    keys = ("batch", "loss", "gradient_norm")
    last = {name: {key: lines[-1][key] for key in keys} if lines else {} for name, lines in both.items()}
    waited_sec = {name: round(sum(line["data_wait_sec"] for line in lines), 2) for name, lines in both.items()}
    good = code == 0 and last["without_fault"] == last["stopped_in_mid_epoch"]
    good = good and last["without_fault"]["batch"] == NUM_BATCHES
    good = good and waited_sec["stopped_in_mid_epoch"] > waited_sec["without_fault"] + 1  # else it came too late
    error = "" if good else (home / "with.log").read_text(errors="replace")[-1500:]
    return {
        "good": good,
        "what": "composer -n 2 benchmark.py, 2 workers a rank, one epoch; last line of metrics.jsonl, to the bit",
        "batches": NUM_BATCHES,
        "shards": shards,
        "stopped_at_batch": stopped_at,
        **last,
        "data_wait_sec": waited_sec,
        "exit_code": code,
        "seconds": round(time.monotonic() - started),
        **({"error": error} if error else {}),
    }


# ---------------------------------------------------------------------------------------------------------------------
# SFTP
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sftp_server(home: Path, serve: str = "internal-sftp") -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the address of a real OpenSSH server's root, and the variables with which streaming finds its keys.

    Args:
        serve: what a session runs.

    Raises:
        Skipped: there is none.
    """
    if not SFTP_SERVER.exists() or not shutil.which("ssh-keygen"):
        raise Skipped(f"no {SFTP_SERVER} here")
    port, user = free_ports(1), getpass.getuser()
    for name in ("host", "user"):
        generate = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)]
        subprocess.run(generate, check=True, timeout=60)
    kind, key = (home / "host.pub").read_text().split()[:2]
    (home / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    (home / "sshd.conf").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {home / 'host'}\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {home / 'user.pub'}\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        f"PermitRootLogin prohibit-password\nAllowUsers {user}\nSubsystem sftp internal-sftp\nForceCommand {serve}\n"
        f"MaxStartups 100\n"
    )
    separated = Path("/run/sshd")  # sshd wants it where root starts it; Debian makes it when the service starts
    is_new = os.getuid() == 0 and not separated.exists()
    if is_new:
        separated.mkdir(mode=0o755)
    server = None
    try:
        with open(home / "sshd.log", "w") as log:
            server = subprocess.Popen(
                [str(SFTP_SERVER), "-D", "-e", "-f", str(home / "sshd.conf")], stderr=log, start_new_session=True
            )
        wait_until_open(port, 20)
        variables = {
            "COMPOSER_SFTP_KNOWN_HOSTS_FILE": str(home / "known_hosts"),
            "COMPOSER_SFTP_KEY_FILE": str(home / "user"),
        }
        yield f"sftp://{user}@127.0.0.1:{port}", variables
    finally:
        if server is not None:
            end(server)
        if is_new:
            with contextlib.suppress(OSError):
                separated.rmdir()


def sftp(nursery: Nursery, home: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """Read the stage over SFTP once with each kind of reader. Raises Skipped: no server here."""
    home.mkdir()
    shutil.copytree(nursery.folder / "stage", home / "stage")
    found: dict[str, Any] = {}
    with sftp_server(home) as (address, variables):
        for kind in kinds:
            given = {"remote": f"{address}{home / 'stage'}", "local": str(home / f"{kind}-cache")}
            reading = Reading(nursery, kind, home / kind, environment=variables, **given)
            reading.finish(GRACE_SEC if kind == "ours" else PLAIN_STALL_SEC, launcher=kind != "ours")
            verdict = judge(reading, NUM_SAMPLES, None, [])
            found[kind] = verdict.outcome
            if verdict.detail:
                found[f"{kind}_detail"] = verdict.detail[:300]
    return {
        "good": found.get("ours", RIGHT) == RIGHT,
        "what": "the stage through OpenSSH's sftp-server, cold cache",
        **found,
    }


# ---------------------------------------------------------------------------------------------------------------------
# The runs as a process
# ---------------------------------------------------------------------------------------------------------------------


class Training:
    """The runs, going on beside everything else."""

    def __init__(self, home: Path, kind: str):
        home.mkdir()
        command = [sys.executable, "-m", "tests.store.extras", "train", str(home), kind]
        self.log = home / "train.log"
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def result(self) -> dict[str, Any]:
        """Wait for their end."""
        self._process.wait(10 * COMMAND_SEC)
        text = self.log.read_text(errors="replace").rstrip()
        with contextlib.suppress(ValueError):
            return json.loads(text.rpartition("\n")[2])
        return {"good": False, "error": text[-1500:]}

    def close(self) -> None:
        """End them, and wait until they have put everything away."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)


def end_with_input() -> None:
    """Let this process end as by SIGTERM when the one who started it is gone."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def main(words: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    _, folder, *kind = words
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=end_with_input, daemon=True).start()
    store = Store(Path(folder) / "server", *kind)
    try:
        store.start()
        print(json.dumps(train(store, Path(folder))), flush=True)
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
