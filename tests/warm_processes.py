"""Python processes that start in 0.1 s: forked from one that has imported torch and Composer, which takes 5 s.

Such a process has its own arguments, variables, streams, session and exit code, and is a child of the tests' process.
`composer -n N` is Composer's launcher with ranks of the same kind. A program's effects at import are not tested this way:
for that, start it cold with `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

# Not what imports W&B (open_clip does): it makes a folder then, which the first process to end would take from the others.
PRELOADED = (
    *("benchmark", "eval", "prepare.latents", "composer.cli.launcher", "torch._dynamo", "streaming"),
    *("diffusers.models.unets.unet_2d_condition", "diffusers.models.autoencoders.autoencoder_kl"),
)
ROOT = Path(__file__).resolve().parent.parent
PR_SET_CHILD_SUBREAPER = 36

_server: socket.socket | None = None


def can_start(command: Sequence[str]) -> bool:
    """True for a Python program or module, and for Composer's launcher."""
    return Path(command[0]).name in ("python", "composer", Path(sys.executable).name)


class Process(subprocess.Popen):
    """A `Popen` whose process is forked from the one that is warm."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startup, flags, shell, *more):
        pipes = more[:6]
        streams = [own if given < 0 else given for own, given in ((0, pipes[0]), (1, pipes[3]), (2, pipes[5]))]
        variables = dict(os.environ if env is None else env)
        self.pid = _fork(list(map(str, args)), str(cwd or Path.cwd()), variables, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def begin() -> None:
    """Start the process that is to be warm, beside whatever comes meanwhile."""
    global _server
    _server, theirs = socket.socketpair()
    serve = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
    own = {"cwd": Path(__file__).parent.parent, "stdin": subprocess.DEVNULL, "start_new_session": True}
    subprocess.Popen(serve, pass_fds=[theirs.fileno()], **own)
    theirs.close()


def _fork(command: list[str], cwd: str, variables: dict[str, str], streams: list[int]) -> int:
    """Ask the server for a process, and return its id. It is this process's child: its parent ends before this returns."""
    if _server is None:
        begin()
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        request = json.dumps([command, cwd, variables]).encode()
        socket.send_fds(_server, [len(request).to_bytes(4, "big")], streams)
        _server.sendall(request)
        return int.from_bytes(_whole(_server, 4), "big")
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _whole(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError("the warm process has ended")
        data += piece
    return data


# --- in the process that is warm, and in those that it makes ---


def serve(connection: socket.socket) -> None:
    """Fork a process for each request, until the tests end."""
    for name in PRELOADED:
        importlib.import_module(name)
    assert "wandb" not in sys.modules, "it makes a temporary folder when it is imported: each process wants its own"
    gc.collect()
    gc.freeze()  # so that what is imported stays shared with those that are forked
    while True:
        length, streams, _, _ = socket.recv_fds(connection, 4, 3)
        if not length:
            return
        command, cwd, variables = json.loads(_whole(connection, int.from_bytes(length, "big")))
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                connection.close()
                os.close(told)
                os.close(tell)
                os.setsid()
                os.chdir(cwd)
                become(command, variables, streams)
            os.write(tell, pid.to_bytes(4, "big"))
            os._exit(0)
        os.waitpid(between, 0)
        connection.sendall(os.read(told, 4))
        for each in (told, tell, *streams):
            os.close(each)


def become(command: list[str], variables: Mapping[str, str], streams: Sequence[int]) -> NoReturn:
    """Run a command in this forked process, and end it as Python ends."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.environ.clear()
    os.environ.update(variables)
    if constants := sys.modules.get("huggingface_hub.constants"):  # read where it was imported
        importlib.reload(constants)
    sys.path[:0] = [each for each in variables.get("PYTHONPATH", "").split(os.pathsep) if each]
    if variables.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    for each in list(weakref.finalize._registry):  # the folders of the one that it was forked from are not its own
        each.detach()
    random.seed()
    code = _code_of(lambda: _run(command))
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def _code_of(work: Callable[[], Any]) -> int:
    try:
        work()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 255
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _run(command: list[str]) -> None:
    program, *words = command
    if Path(program).name == "composer":
        from composer.cli import launcher

        sys.argv = command
        launcher.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": Rank})  # its own name alone
        sys.exit(launcher.main())
    if words[0] == "-u":
        words = words[1:]
    if Path.cwd() != ROOT and Path("bench", "micro.py").is_file():
        _forget_this_checkout()
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], str(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _forget_this_checkout() -> None:
    """Let a process that works in another checkout import that one's modules."""
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "/")
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts and name != "__main__":
            del sys.modules[name]


class Rank(subprocess.Popen):
    """What the launcher starts: forked from the launcher itself."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startup, flags, shell, *more):
        pipes = more[:6]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            streams = [own if given < 0 else given for own, given in ((0, pipes[0]), (1, pipes[3]), (2, pipes[5]))]
            become(list(map(str, args)), dict(os.environ), streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())
    serve(socket.socket(fileno=int(sys.argv[1])))
