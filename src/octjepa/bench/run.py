"""One comparison from its name to its figures."""

from __future__ import annotations

import logging
import os
import platform
from importlib.metadata import version
from typing import Any

from octjepa.bench.alternating_runs import summary, take_turns
from octjepa.bench.benchmarks import SUBJECTS
from octjepa.errors import UsageError

_log = logging.getLogger(__name__)
_BUSY = 0.5  # of the cores


def run_bench(subject: str, against: str | None = None, repeats: int | None = None) -> dict[str, Any]:
    """{"subject", "against", "ours_is", "other_is", "unit", "reads", "ours", "other", "ratio", "spread", "runs",
    "setup", "machine"}: medians over the runs in `unit`; `ratio` is the median of the runs' ours / other, `spread` its
    least and largest; `machine` says how busy it was when the work began.

    Raises UsageError: no such subject or peer (with those there are), fewer than one run, a library that is absent.
    """
    if subject not in SUBJECTS:
        raise UsageError(f"nothing to measure is called {subject!r}: there are {', '.join(SUBJECTS)}")
    asked = SUBJECTS[subject]
    name = next(iter(asked.peers)) if against is None else against
    if name not in asked.peers:
        raise UsageError(f"bench {subject} knows no {name!r}: it can be measured against {', '.join(asked.peers)}")
    count = asked.repeats if repeats is None else repeats
    if count < 1:
        raise UsageError(f"--repeats must be 1 at least, got {count}")
    load, cores = round(os.getloadavg()[0], 2), os.cpu_count() or 1
    machine = {"processor": platform.machine(), "cores": cores, "load": load, "torch": version("torch")}
    if load > _BUSY * cores:
        _log.warning(
            "this machine is at other work (load %.1f on %d cores): take the ratio with its spread, and the figures as "
            "low. Threads that wait for each other suffer most; OMP_WAIT_POLICY=passive helps them",
            load, cores,
        )  # fmt: skip
    peer = asked.peers[name]
    with peer.contest() as contest:
        found = summary(take_turns(contest, count, f"bench {subject}"))
    about = {"subject": subject, "against": name, "ours_is": asked.ours, "other_is": peer.says}
    about |= {"unit": asked.unit, "reads": asked.reads}
    return {**about, **found, "setup": dict(contest.setup), "machine": machine}
