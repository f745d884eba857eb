"""A time limit for work in the calling process, in any thread.

A worker process that takes too long is killed. Work in the calling process (`octjepa inspect`, the viewer, an ingest
with one worker) is interrupted by an exception that another thread raises in it. The interruption takes effect between
two Python instructions: a single call of a C library ends first.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from octjepa.errors import VolumeRejected

SECONDS_PER_FILE = 600.0  # a hundred times what the largest known scan takes


class TimeUp(BaseException):
    """The time limit of the surrounding `time_limit` is over.

    It is not an Exception, so that code which replaces a damaged part of a file cannot catch it by mistake.
    """


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupts the work inside the context after `seconds`.

    An infinite limit costs nothing. Contexts may be nested; each one raises for its own limit.
    Raises VolumeRejected timed_out.
    """
    if math.isinf(seconds):
        yield
        return
    expired: type[BaseException] = type(
        "TimeUp", (TimeUp,), {}
    )  # of this context, so that an outer context's limit passes through
    thread, lock = threading.get_ident(), threading.Lock()
    finished, fired = threading.Event(), threading.Event()

    def interrupt() -> None:
        with lock:
            if not finished.is_set():
                fired.set()
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(expired))

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                finished.set()
            timer.cancel()
        while fired.is_set():  # the work ended as the limit did: the exception is still to come
            time.sleep(0.001)
    except expired:
        raise VolumeRejected("timed_out", f"not done after {seconds:g} s") from None
