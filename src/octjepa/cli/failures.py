"""A verb's failure: one message on stderr and the right exit code, for every failure that a user can meet.

What only a fault of octjepa can cause shows as a traceback.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress
from types import FrameType

from octjepa.errors import OctjepaError, is_out_of_memory
from octjepa.parsing import printable

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_WHAT_TO_DO = {
    errno.ENOENT: "check the name, or make the folder first",
    errno.ENOTDIR: "there is a file where a folder is needed: name another path",
    errno.EISDIR: "there is a folder where a file is needed: name another path",
    errno.EEXIST: "there is a file where a folder is needed: name another path",
    errno.EACCES: "name a path that you may read, or write to if it is an output",
    errno.EPERM: "name a path that you may read, or write to if it is an output",
    errno.EROFS: "that file system is read-only: name an output elsewhere",
    errno.ENAMETOOLONG: "check the path: it is longer than the system allows",
}
_AFTER_STOP = {
    "ingest": "what was read is in the store; run the same command again to continue",
    "pretrain": "continue from the newest checkpoint with --resume, or start a new run with another --out",
    "finetune": "continue from the newest checkpoint with --resume, or start a new run with another --out",
    "view": "the viewer is closed",
    "phantom": "the folder holds only a part of the cohort: remove it before you run the command again",
}


class Terminated(KeyboardInterrupt):
    """SIGTERM came, or SIGHUP as the terminal is gone. Treated as Ctrl-C, so that all is closed in order."""


@contextmanager
def exit_with_message(verb: Callable[[], str | None]) -> Iterator[None]:
    """Turns every foreseeable failure inside into one message on stderr and SystemExit with the right code.

    `verb()` is the verb's name, called once something stopped it.
    """
    message, code = "", 0
    with _raise_on_sigterm():
        try:
            yield
        except OctjepaError as error:
            message, code = str(error), error.exit_code
        except KeyboardInterrupt as stop:
            what, code = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
            message = f"{what}; {_AFTER_STOP.get(verb() or '', 'nothing is half-written; run the same command again')}"
        except BrokenExecutor:
            message, code = f"a worker process died. {_out_of_memory()}", 1
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of stdout went away, as `head` does; typer ends quietly
            message, code = _system_error(error)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            message, code = _out_of_memory(), 1
    if code:
        with suppress(OSError):  # the terminal may be gone
            print(f"octjepa: {printable(message)}", file=sys.stderr)
        sys.exit(code)


def _out_of_memory() -> str:
    return "out of memory: use fewer --workers, a smaller machine.micro_batch or a smaller recipe"


def _system_error(error: OSError) -> tuple[str, int]:
    where = error.filename2 or error.filename
    what = f"{error.strerror or error}{'' if where is None else f': {os.fsdecode(where)}'}"
    if error.errno in _FULL_DISK:
        return f"the disk is full ({what}); free some space and run the same command again", 1
    if error.errno in _WHAT_TO_DO and where is not None:
        return f"{what}; {_WHAT_TO_DO[error.errno]}", 2
    return f"the system refused: {what}", 1


@contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    """While open, SIGTERM and SIGHUP raise Terminated in this process; children that inherit the handler simply end.

    Under nohup, which ignores SIGHUP, it stays ignored.
    """
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            raise Terminated
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():  # Python sets handlers only in the main thread
        yield
        return
    caught = [signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else [])]
    previous = {number: signal.signal(number, stop) for number in caught}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
