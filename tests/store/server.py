"""A real S3 store on loopback that can be stopped, frozen and slowed.

OpenStack Swift where Debian's packages are installed (swift_s3.sh says which). Elsewhere moto's server, whose data are in
memory: it keeps running behind a relay, and what is stopped and frozen is the relay. It asks for no credentials.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SWIFT = Path("/usr/bin/swift-proxy-server")
BUCKET = "easel"
USER, GUEST, SECRET = "test:tester", "test:guest", "testing"  # the guest is known and may do nothing
START_SEC = 60.0


def free_ports(count: int) -> int:
    """Return the first of so many neighbouring ports that nobody uses.

    Below the ports that the kernel gives to clients (from 32768): a stopped server has to find its own free again.
    """
    while True:
        first = random.SystemRandom().randrange(15000, 32000, 8)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                taken = stack.enter_context(socket.socket())
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(("127.0.0.1", port))
            return first


def wait_until_open(port: int, limit_sec: float) -> None:
    """Return when a server listens on the port. Raises TimeoutError."""
    deadline = time.monotonic() + limit_sec
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on 127.0.0.1:{port} after {limit_sec:.0f} s")
        time.sleep(0.05)


def start_relay(port: int, target_port: int, bytes_per_sec: float | None = None) -> subprocess.Popen[bytes]:
    """Start relay.py and return it when it listens."""
    rate = [] if bytes_per_sec is None else [str(bytes_per_sec)]
    command = [sys.executable, "-I", str(HERE / "relay.py"), str(port), str(target_port), *rate]
    relay = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    wait_until_open(port, 20)
    return relay


def end(process: subprocess.Popen[Any]) -> None:
    """End a process of ours at once, a frozen one too."""
    process.kill()
    process.wait(10)
    if process.stdin:
        process.stdin.close()


class Store:
    """An S3 store with the bucket `easel`.

    Args:
        folder: a new folder for its data and logs; it is removed at the end.
        kind: swift or moto; None: what there is.
    """

    def __init__(self, folder: Path, kind: str | None = None):
        self.kind = kind or ("swift" if SWIFT.exists() else "moto")
        self.folder = folder
        self.folder.mkdir(parents=True)
        self.port = free_ports(5)
        self._is_up = False
        self._frozen: int | None = None
        self._moto: subprocess.Popen[bytes] | None = None
        self._relay: subprocess.Popen[bytes] | None = None
        # Ends and removes everything when this process is gone, in whatever way.
        guard = [str(HERE / "swift_s3.sh"), "guard", str(folder)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True, **quiet)

    @property
    def address(self) -> str:
        """host:port, as it stands in the clients' own messages."""
        return f"127.0.0.1:{self.port}"

    def environment(self, user: str = USER, secret: str = SECRET, port: int | None = None) -> dict[str, str]:
        """Return the variables that lead a client there."""
        of_user = {"AWS_ACCESS_KEY_ID": user, "AWS_SECRET_ACCESS_KEY": secret, "AWS_DEFAULT_REGION": "us-east-1"}
        address = {"S3_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}", "NO_PROXY": "127.0.0.1"}
        return {**of_user, **address, "AWS_EC2_METADATA_DISABLED": "true"}

    # --- up and down ---

    def start(self) -> None:
        """Bring it up, with the data that it had. Does nothing where it is up."""
        if self._is_up:
            return
        if self.kind == "swift":
            self._swift("start", str(self.port))
        else:
            if self._moto is None:
                self._start_moto()
            self._relay = start_relay(self.port, self.port + 1)
        self._is_up = True
        assert self.client  # makes the bucket, the first time

    def stop(self) -> None:
        """Take it down: connections break, new ones are refused. The data stay. Does nothing where it is down."""
        if not self._is_up:
            return
        self.thaw()
        if self.kind == "swift":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._front, signal.SIGTERM)  # at once: the script takes a third of a second
            self._swift("stop")
        else:
            assert self._relay is not None
            end(self._relay)
        self._is_up = False

    def close(self) -> None:
        """Stop it for good and remove its data."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self.stop()
        if self._moto is not None and self._moto.stdin is not None:
            self._moto.stdin.close()
            self._moto.wait(20)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(60)

    def freeze(self) -> None:
        """Let it accept connections and answer nothing."""
        self._frozen = self._front
        os.kill(self._frozen, signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo `freeze`."""
        if self._frozen is not None:
            os.kill(self._frozen, signal.SIGCONT)
            self._frozen = None

    def heal(self) -> None:
        """Bring it back from whatever was done to it."""
        self.thaw()
        self.start()

    @contextlib.contextmanager
    def slowed(self, bytes_per_sec: float) -> Iterator[int]:
        """Yield the port of a slow way to it."""
        port = free_ports(1)
        relay = start_relay(port, self.port, bytes_per_sec)
        try:
            yield port
        finally:
            end(relay)

    @property
    def _front(self) -> int:
        """The process that clients speak to."""
        if self.kind == "swift":
            return int((self.folder / "run/proxy.pid").read_text())
        assert self._relay is not None
        return self._relay.pid

    def _swift(self, *words: str) -> None:
        command = [str(HERE / "swift_s3.sh"), words[0], str(self.folder), *words[1:]]
        with open(self.folder / "swift_s3.log", "a+") as log:  # a pipe would be held open by the servers
            variables = {**os.environ, "SWIFT_S3_KEY_ID": USER, "SWIFT_S3_SECRET": SECRET}
            if subprocess.run(command, stdout=log, stderr=log, env=variables, timeout=START_SEC).returncode:
                log.seek(0)
                raise RuntimeError(f"{' '.join(command)} failed: {log.read()[-2000:]}")

    def _start_moto(self) -> None:
        # Through a shell that waits for the end of its input, so that it cannot outlive this process.
        serve = f"{sys.executable} -m moto.server -H 127.0.0.1 -p {self.port + 1} >/dev/null 2>&1 </dev/null"
        command = ["bash", "-c", f"{serve} & trap 'kill %1' EXIT; cat >/dev/null"]
        self._moto = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        wait_until_open(self.port + 1, START_SEC)

    # --- objects ---

    @cached_property
    def client(self) -> Any:
        """A client with all rights."""
        import boto3
        from botocore.config import Config

        config = Config(connect_timeout=5, read_timeout=30, retries={"max_attempts": 5})
        of_user = {"aws_access_key_id": USER, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}", config=config, **of_user)
        client.create_bucket(Bucket=BUCKET)
        return client

    def put(self, key: str, content: bytes) -> None:
        """Put an object, in place of the one that there is."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.client.delete_object(Bucket=BUCKET, Key=key)
