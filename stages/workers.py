"""How a loader's worker process ends: with its trainer, and by nothing but its trainer."""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import signal
import threading

from cli.private_api import require_private_api

require_private_api(multiprocessing.util, "Finalize", why="a worker leaves at once at its end")


def live_as_worker(worker_id: int) -> None:
    """Let a loader worker end with its trainer, whatever ended that, and by nothing but its trainer.

    A batch system sends SIGTERM to every process of a job, and a terminal SIGINT (Ctrl-C); a worker that obeyed would take
    the trainer down before it has written its checkpoint. A worker whose trainer was killed would live on, and hold the
    shared memory that a restart needs.
    """
    if hasattr(signal, "sigwaitinfo"):  # Linux
        PR_SET_PDEATHSIG = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_the_trainer_says_so, daemon=True).start()
    # At its end leave at once: threads that a store's client has made may be joined only when its answer comes, and the
    # loader gives each worker five seconds for that.
    multiprocessing.util.Finalize(None, os._exit, args=(0,), exitpriority=-100)


def _end_when_the_trainer_says_so() -> None:
    trainer = os.getppid()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
