"""One writer at a time to a folder in a bucket: the object `.lock` in it, made only if there is none."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octjepa.errors import OctjepaError, UsageError
from octjepa.parsing import parse_json
from octjepa.remote.address import join
from octjepa.remote.bucket import info, put_bytes, remove
from octjepa.remote.cache import cache_folder, read_bytes

_log = logging.getLogger(__name__)


@contextmanager
def bucket_lock(folder: str) -> Iterator[None]:
    """Holds the folder at the url `folder`. Raises UsageError where another process has it.

    The lock of a killed process of this machine is replaced; that of another machine stays until it is removed.
    """
    url = join(folder, ".lock")
    me = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "machine": _machine(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "token": uuid.uuid4().hex,
    }
    content = json.dumps(me).encode()
    while not put_bytes(content, url, only_if_absent=True):
        holder = _holder(url)
        if holder is None:
            continue  # released in this moment
        if holder.get("machine") == me["machine"] and not _is_alive(int(holder.get("process", 0))):
            _take_away(url, holder)
            continue
        raise UsageError(
            f"another process is writing to {url.rpartition('/')[0]}: number {holder.get('process', 'unknown')} on "
            f"{holder.get('host', 'an unknown machine')}, {_age(str(holder.get('since', '')))}. Wait for it to "
            f"end. If you are sure that it was killed, remove the object {url} and run the same command again"
        )
    try:
        yield
    finally:
        if _holder(url) == me:
            remove(url)
        else:
            _log.warning("%s was removed while this process was writing: check whether another process wrote too", url)


def _take_away(url: str, holder: Mapping[str, object]) -> None:
    """Removes the lock of a process of this machine that has ended.

    One process at a time does so, and only while the lock is still that of `holder`. Of two processes that find it, the
    second would otherwise remove the lock that the first has put in its place, and both would write.
    """
    with (cache_folder("locks") / "bucket").open("w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        if _holder(url) == holder:
            _log.warning("%s was left by process %s, which has ended: taken over", url, holder["process"])
            remove(url)


def _holder(url: str) -> dict[str, Any] | None:
    """The record of the lock's process; {} if it is unreadable, None without a lock."""
    try:
        content = parse_json(read_bytes(url))
        return content if isinstance(content, dict) else {}
    except ValueError:
        return {}
    except OctjepaError:
        if info(url) is None:
            return None
        raise


def _age(since: str) -> str:
    """How long a lock has been held, for a message only: no lock ends by its age, since clocks differ and jump."""
    try:
        began = datetime.fromisoformat(since)
        minutes = (datetime.now(UTC) - began).total_seconds() / 60
    except (ValueError, TypeError):
        return "for an unknown time"
    if minutes < 0:
        return f"since {began:%Y-%m-%d %H:%M} UTC by its clock, which is ahead of this one"
    return f"for {minutes:.0f} minutes" if minutes < 120 else f"for {minutes / 60:.0f} hours"


def _machine() -> str:
    """Identifies this machine since its start, and the namespace of its process numbers."""
    parts = [socket.gethostname()]
    for path, read in (("/proc/sys/kernel/random/boot_id", Path.read_text), ("/proc/self/ns/pid", Path.readlink)):
        try:
            parts.append(str(read(Path(path))).strip())
        except OSError:
            continue  # not Linux: the host name has to do
    return " ".join(parts)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
