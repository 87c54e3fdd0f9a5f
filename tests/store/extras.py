"""A real SFTP server on loopback."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.server import end, free_ports, wait_until_open

SFTP_SERVER = Path("/usr/sbin/sshd")


@contextlib.contextmanager
def sftp_server(home: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the address of a real OpenSSH server's root, and the variables with which streaming finds its keys."""
    if not SFTP_SERVER.exists() or not shutil.which("ssh-keygen"):
        pytest.skip(f"no {SFTP_SERVER} here")
    port, user = free_ports(1), getpass.getuser()
    for name in ("host", "user"):
        generate = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)]
        subprocess.run(generate, check=True, timeout=60)
    kind, key = (home / "host.pub").read_text().split()[:2]
    (home / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    (home / "sshd.conf").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {home / 'host'}\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {home / 'user.pub'}\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        f"PermitRootLogin prohibit-password\nAllowUsers {user}\nSubsystem sftp internal-sftp\nMaxStartups 100\n"
    )
    separated = Path("/run/sshd")  # sshd wants it where root starts it; Debian makes it when the service starts
    is_new = os.getuid() == 0 and not separated.exists()
    if is_new:
        separated.mkdir(mode=0o755)
    command = [str(SFTP_SERVER), "-D", "-e", "-f", str(home / "sshd.conf")]
    variables = {"KNOWN_HOSTS_FILE": str(home / "known_hosts"), "KEY_FILE": str(home / "user")}
    with open(home / "sshd.log", "w") as log:
        server = subprocess.Popen(command, stderr=log, start_new_session=True)
    try:
        wait_until_open(port, 20)
        yield f"sftp://{user}@127.0.0.1:{port}", {f"COMPOSER_SFTP_{name}": value for name, value in variables.items()}
    finally:
        end(server)
        if is_new:
            with contextlib.suppress(OSError):
                separated.rmdir()
