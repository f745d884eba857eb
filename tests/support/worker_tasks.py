"""What a worker process can do to itself, told by the name of its file; importable in that process."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from dataclasses import replace
from typing import Any

from octjepa.errors import OctjepaError
from octjepa.ingest import SourceFile
from octjepa.ingest.one_file import RefusedFile, Result
from octjepa.ingest.worker_pool import AHEAD
from octjepa.read import memory_budget
from octjepa.read.personal_data import StatedPerson


def obey(source: SourceFile) -> RefusedFile:
    """Crashes, hangs, fails or answers with its process id, as the file's name says."""
    name = source.name.partition(".")[0]
    if name == "segfault":
        faulthandler.disable()  # inherited from pytest; it would print a page of stack
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "once":  # dies the first time, as under memory that others hold
        mark = source.path.with_suffix(".died")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if name == "hang":
        time.sleep(600)
    if name == "full":
        raise OctjepaError("the disk is full")
    if name == "fast":
        source.path.touch()
    if name == "pair":  # continues when its twin works too
        source.path.touch()
        while len(list(source.path.parent.glob("pair.*"))) < 2:
            time.sleep(0.01)
    if name == "gate":  # waits for as many others as there can be
        while len(list(source.path.parent.glob("fast.*"))) < 2 * AHEAD - 1:
            time.sleep(0.01)
    if name in ("slow", "gate"):
        time.sleep(0.3)
    detail = {"detail": str(memory_budget._workers)} if name == "workers" else {}
    return RefusedFile({"file": source.name, "reason": "read", "by": str(os.getpid()), **detail}, StatedPerson())


def poisoned(source: SourceFile, **settings: Any) -> Result:
    """The ingest of one file, whose process eye3.dcm ends."""
    from octjepa.ingest.one_file import ingest_one

    if source.name.endswith("eye3.dcm"):
        return obey(replace(source, name="segfault"))
    return ingest_one(source, **settings)


def die_on_bad(source: SourceFile, job: Any) -> RefusedFile:
    """In the place of a Ray worker's task: the file "bad" takes the whole worker with it."""
    if source.name == "bad":
        os._exit(1)
    return RefusedFile({"reason": "read", "file": source.name}, StatedPerson())


def embed_after_a_kill(part: tuple[int, list[str]], job: Any) -> tuple[int, str]:
    """The embedding of one part on a Ray worker, which SIGKILL takes with it the first time that it meets part 1."""
    from octjepa.embed.ray_tasks import embed_on_machine

    mark = job.folder.parent / "killed"
    if part[0] == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return embed_on_machine(part, job)
