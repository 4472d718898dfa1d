"""The process that owns model, pool and step loop: python -m executor_svc.worker <pipe> <lines>, two descriptors.

Knows how such a process starts and ends. Does not know gRPC. The front starts it and is its only user; when the pipe ends,
the worker ends.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time

from common.errors import StartupError
from common.frames import Frame, FrameKind, FramePipe
from common.logs import setup_logging
from common.switch_interval import switch_often
from executor_svc.model.prepare import prepare_model
from executor_svc.settings import ExecutorSettings

log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with_the_front() -> None:
    """Has the kernel end this process with its parent; the end of the pipe alone would be seen only after loading."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _import_engine() -> None:
    """Brings transformers along, which takes seconds more. If it fails, so does the next import, which is in the right place."""
    with contextlib.suppress(Exception):
        importlib.import_module("executor_svc.engine")


def main(pipe_fd: int, lines_fd: int) -> int:
    """Serves the front at the other end of the pipe; returns the exit status."""
    # The front alone decides when the worker ends: a Ctrl-C reaches both, and the front wants the last results.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_the_front()
    faulthandler.enable()
    pipe = FramePipe(socket.socket(fileno=pipe_fd))
    frames = pipe.receive(wait=True)
    if frames is None:
        return 0
    settings = ExecutorSettings.from_json(frames[0].payload)
    setup_logging(settings.executor_id, settings.log_level)

    def progress(text: str) -> None:
        pipe.send(Frame(FrameKind.PROGRESS, payload=text.encode()))

    switch_often()
    started = time.monotonic()
    try:
        folder = prepare_model(settings.model, settings.cache_dir, progress, needs_weights=settings.load_format == "auto")
        prepared = time.monotonic()
        # torch takes seconds to import: until here, a name that does not exist costs none.
        from executor_svc.cuda.early import early_work

        work = early_work(settings, folder)
        importing = threading.Thread(target=_import_engine, daemon=True)
        importing.start()
        work()
        importing.join()
        from executor_svc.engine import build_engine
        from executor_svc.inbox import Inbox
        from executor_svc.metrics import serve_metrics
        from executor_svc.step_loop import StepLoop

        phases = {"prepare": prepared - started, "import": time.monotonic() - prepared}
        serve_metrics(settings.metrics_listen)
        engine = build_engine(settings, folder, progress, phases)
    except StartupError as error:
        pipe.send(Frame(FrameKind.REFUSED, payload=error.message.encode()))
        return 1
    except ConnectionError:
        log.info("the front is gone")
        return 0
    # What start-up made lives as long as the process: the collector need not look at it in the middle of a step.
    gc.collect()
    gc.freeze()
    pipe.send(Frame(FrameKind.READY, payload=engine.info.SerializeToString()))
    StepLoop(Inbox(pipe, socket.socket(fileno=lines_fd)), engine, save_drain_s=settings.save_drain_s).run()
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    logging.shutdown()
    # Threads of the store's client and of compute libraries must not hold the end up.
    os._exit(status)
