"""How a verb tells its result and its failure: figures or JSON on stdout, one message on stderr, the right exit code.

With JSON, stdout holds one object and nothing else; figures that are not finite are null there, as JSON has no word for
them. A failure that a user can meet never shows as a traceback; one that only a fault of octjepa can cause does.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import FrameType
from typing import Any

from octjepa.errors import OctjepaError, UsageError
from octjepa.metrics.findings import BASELINES

_FIGURE = {"value", "low", "high"}  # the keys of one, with its interval
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_WHAT_TO_DO = {
    errno.ENOENT: "check the name, or make the folder first",
    errno.ENOTDIR: "a file stands where a folder is needed: name another path",
    errno.EISDIR: "a folder stands where a file is needed: name another path",
    errno.EEXIST: "a file stands where a folder is needed: name another path",
    errno.EACCES: "name a path that you may read, or write to if it is an output",
    errno.EPERM: "name a path that you may read, or write to if it is an output",
    errno.EROFS: "that file system is read-only: name an output elsewhere",
    errno.ENAMETOOLONG: "check the path: it is longer than the system allows",
}
_AFTER_STOP = {
    "ingest": "what was read is in the store; run the same command again to go on",
    "pretrain": "go on from the newest checkpoint with --resume, or start anew with another --out",
    "finetune": "go on from the newest checkpoint with --resume, or start anew with another --out",
    "view": "the page answers no longer",
    "phantom": "the folder holds a part of the cohort: remove it before you run the command again",
}


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Treated as Ctrl-C, so that everything open is closed in order."""


def say(payload: Mapping[str, Any], as_json: bool, rows: str = "", primary: Collection[str] = ()) -> None:
    """Prints a verb's result. `rows` names the key that holds probe rows: as text they become a table.

    The table keeps the metrics of `primary`; JSON always holds everything. Of the processes of a launcher, which all
    hold the same result, rank 0 prints it.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(_plain(payload), allow_nan=False), flush=True)
        return
    shown = {key: value for key, value in payload.items() if key != rows and value not in ("", None, [], {})}
    width = max(map(len, shown), default=0)
    for key, value in shown.items():
        print(f"{key:<{width}}  {_text(value)}")
    if rows:
        print("\n".join(probe_table(payload[rows], primary)))
    sys.stdout.flush()


def say_probes(payload: dict[str, Any], rows: str, as_json: bool) -> None:
    """As text: a table of each target's primary metric, then on stderr what it comes to and where the rest is."""
    from octjepa.metrics.scores import PRIMARY_METRIC

    primary = set(PRIMARY_METRIC.values())
    paired = payload["paired"]
    if as_json:
        say(payload, as_json)
        return
    say({key: value for key, value in payload.items() if key != "paired"}, as_json, rows, primary)
    if paired:
        told = f"{paired['name']} minus {paired['reference']}, {paired['target']} {paired['metric']}"
        how = f"{paired['probe']}, {paired['pool']}; same {paired['n_people']} test people"
        print(f"{told}: {interval(paired, 'difference')} ({how})", file=sys.stderr)
    left_out = sum(row["metric"] not in primary for row in payload[rows])
    if left_out:
        print(f"{left_out} more figures (other metrics) with --json", file=sys.stderr)


def say_checks(payload: Mapping[str, Any], as_json: bool) -> None:
    """What `doctor` found: as text a line a check, and below those that are not well what was expected and to do."""
    if as_json:
        say(payload, as_json)
        return
    width = max(len(check["name"]) for check in payload["checks"])
    for check in payload["checks"]:
        print(f"{check['state']:<8} {check['name']:<{width}}  {check['found']}")
        if check["state"] != "ok":
            print(f"{'':<9}{'':<{width}}  expected: {check['expected']}")
        if check["to_do"]:
            print(f"{'':<9}{'':<{width}}  {check['to_do']}")
    sys.stdout.flush()


def ready_to_write(out: Path) -> None:
    """Finds out before the work, not after it, that a result could not be written. Raises UsageError."""
    if out.is_dir():
        raise UsageError(f"{out} is a folder: give --out the name of a file")
    if not out.parent.is_dir():
        raise UsageError(f"no folder {out.parent} to write {out.name} into: create it first")
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"{out.parent} may not be written to: give --out a file elsewhere")


def probe_table(rows: Sequence[Mapping[str, Any]], primary: Collection[str]) -> list[str]:
    """Lines of an aligned table: target by target with the macro average first, encoders above what knows nothing."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    chosen = [row for row in rows if row["metric"] in primary]
    chosen.sort(key=lambda row: (row["target"] != "macro", targets.index(row["target"]), _rank(row["name"])))
    columns = ("name", "target", "probe", "pool", "metric")
    cells: list[tuple[str, ...]] = [(*columns, "value [95 %]", "n")]
    cells += [(*(str(row[key]) for key in columns), interval(row), str(row["n"])) for row in chosen]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def interval(row: Mapping[str, Any], key: str = "value") -> str:
    """`0.873 [0.81, 0.92]`; without an honest interval the figure alone, without a figure `none`."""
    if row[key] is None or not math.isfinite(row[key]):
        return "none"
    if row["low"] is None or row["high"] is None:
        return f"{row[key]:.3f}"
    return f"{row[key]:.3f} [{row['low']:.2f}, {row['high']:.2f}]"


def _rank(name: str) -> int:
    family = name.partition(":")[0]
    return 1 + BASELINES.index(family) if family in BASELINES else 0


def _plain(value: Any) -> Any:
    """Plain JSON data. Raises TypeError for what is none: nothing is turned into text unseen."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays, without importing it
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        if value.keys() >= _FIGURE:
            return interval(value)
        if value and all(isinstance(item, Mapping) and item.keys() >= _FIGURE for item in value.values()):
            width = max(map(len, value))
            return "".join(f"\n  {key:<{width}}  {_text(item)}" for key, item in value.items())
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], Mapping):
            return "".join("\n  " + "; ".join(map(_text, item.values())) for item in value)
        return f"[{', '.join(map(_text, value))}]" if value else "none"
    return str(value)


@contextmanager
def told(verb: Callable[[], str | None]) -> Iterator[None]:
    """Turns every foreseeable failure inside into one message on stderr and SystemExit with the right code.

    `verb` is asked for the verb's name once something stopped it.
    """
    message, code = "", 0
    with _sigterm_stops():
        try:
            yield
        except OctjepaError as error:
            message, code = str(error), error.exit_code
        except KeyboardInterrupt as stop:
            what, code = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
            message = f"{what}; {_AFTER_STOP.get(verb() or '', 'nothing is half-written; run the same command again')}"
        except MemoryError:
            message, code = _out_of_memory(), 1
        except BrokenExecutor:
            message, code = f"a worker process died. {_out_of_memory()}", 1
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of stdout went away, as `head` does; typer ends quietly
            message, code = _refused(error)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in str(error):
                raise
            message, code = _out_of_memory(), 1
    if code:
        print(f"octjepa: {message}", file=sys.stderr)
        sys.exit(code)


def _out_of_memory() -> str:
    return "out of memory: use fewer --workers, a smaller machine.micro_batch or a smaller recipe"


def _refused(error: OSError) -> tuple[str, int]:
    where = error.filename2 or error.filename
    what = f"{error.strerror or error}{'' if where is None else f': {os.fsdecode(where)}'}"
    if error.errno in _FULL_DISK:
        return f"the disk is full ({what}); free some space and run the same command again", 1
    if error.errno in _WHAT_TO_DO and where is not None:
        return f"{what}; {_WHAT_TO_DO[error.errno]}", 2
    return f"the system refused: {what}", 1


@contextmanager
def _sigterm_stops() -> Iterator[None]:
    """While open, SIGTERM raises Terminated in this process; children that inherit the handler simply end."""
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            raise Terminated
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in the main thread alone
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
