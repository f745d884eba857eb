"""Every verb that writes, killed and refused wherever it writes, and begun again: it must end as if nothing had been.

    .venv/bin/python tests/stress/kill_verbs.py [VERB ...] [--kills 100] [--out benchmarks/records/kill_verbs.json]

Inputs are small (tests/support/verbs.py), so that hundreds of lives take an hour. Each life is a forked process that
runs the command; then the same command runs undisturbed (`finetune` with --resume where it had begun). At the end all
files are compared with those of a run that was never touched, times left out, and nothing hidden may be left.
Counts are saved after every life, and the same command continues with those that are missing.

    at_every_write     kill -9 right before the n-th write of a life, for every n
    full_disk          every write from the n-th on fails with ENOSPC: one line for the user, then the same again
    no_rights          the same with EACCES
    open_files         64 open files at most: it ends well, or says in one line what to do
    closed_output      stdout has no reader any more (SIGPIPE)
    hung_up            SIGHUP at random moments: one line and the code of a stop
    asked_to_stop      SIGTERM at random moments, as job schedulers send it: the same
    at_random_moments  kill -9 at a random moment, until so many kills have met a living process
"""

from __future__ import annotations

import argparse
import errno
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from disturbances import HANG, End, close_stdout, die_at_write, fail_from_write, few_open_files, live
from octjepa.files import write_json
from verbs import Inputs, Verb, differences, import_all, left_over

Cell = dict[str, Any]
Save = Callable[[], None]


class Matrix:
    """The disturbances of one verb; `whole` is the folder of its undisturbed life, `seconds` how long that took."""

    def __init__(self, verb: Verb, work: Path) -> None:
        self.verb, self.work, self.rng = verb, work, random.Random(verb.name)
        work.mkdir(parents=True)
        life = self._new_life()
        end = self._live(life)
        assert end.code == 0, end.message
        assert not left_over(life), left_over(life)
        self.whole = life.rename(work / "whole")  # lived where all others will live: paths are in what is compared
        self.seconds = end.seconds

    def _live(self, life: Path, *before: Callable[[], object], **how: Any) -> End:
        return live(self.verb.command(life), self.work / "stderr", *before, **how)

    def _new_life(self) -> Path:
        life = self.work / "life"
        life.mkdir()
        return life

    def _faults(self, life: Path) -> list[str]:
        return [*differences(life, self.whole), *left_over(life)]

    def _check(self, found: Cell, life: Path, disturbed: End, is_clear: bool) -> None:
        """Counts one disturbed life: begins the command again and compares what it ends with.

        One that ended whole is not begun again: another look at the test people would count, and be refused or differ.
        """
        wrong = self._faults(life)
        found["hangs"] += disturbed.code == HANG
        if wrong:
            again = self._live(life)
            found["hangs"] += again.code == HANG
            wrong = self._faults(life) if again.code == 0 else [again.message[-400:]]
        found["lives"] += 1
        found["unclear"] += not is_clear
        found["ends_that_differ"] += bool(wrong)
        if (wrong or not is_clear) and not found["first_fault"]:
            found["first_fault"] = (
                f"life {found['lives']}, code {disturbed.code}: {disturbed.message[-400:]!r}; {'; '.join(wrong[:5])}"
            )
        shutil.rmtree(life)

    def at_writes(
        self,
        found: Cell,
        save: Save,
        disturb: Callable[[Path, int], Callable[[], None]],
        step: int,
        is_clear: Callable[[End], bool],
    ) -> None:
        """A life for every write, or every `step`-th, on from the last one in `found`."""
        while "writes" not in found:
            life, number = self._new_life(), found["lives"] * step
            end = self._live(life, disturb(life, number))
            if end.code == 0 and not differences(life, self.whole):  # it ended before its n-th write: all are done
                shutil.rmtree(life)
                found["writes"] = number
            else:
                self._check(found, life, end, is_clear(end))
            save()

    def at_random(
        self, found: Cell, save: Save, signal_number: int, lives: int, is_clear: Callable[[End], bool]
    ) -> None:
        """Signals at random moments until `lives` have met a living process."""
        self.rng = random.Random(f"{self.verb.name} {signal_number} {found['lives']}")
        while found["lives"] < lives:
            life, after = self._new_life(), self.rng.uniform(0, self.seconds)
            end = self._live(life, after_seconds=after, number=signal_number)
            if end.code == 0:
                shutil.rmtree(life)
                self.seconds = 0.8 * self.seconds + 0.2 * end.seconds
            else:
                self._check(found, life, end, is_clear(end))
                save()

    def once(self, found: Cell, save: Save, before: Callable[[], None], is_clear: Callable[[End], bool]) -> None:
        """One life with `before`."""
        if not found["lives"]:
            life = self._new_life()
            end = self._live(life, before)
            self._check(found, life, end, is_clear(end))
            save()


def is_killed(end: End) -> bool:
    """Whether the kill was met."""
    return end.code == -signal.SIGKILL


def is_stopped(end: End) -> bool:
    """Whether a signal ended it: in its first moment as the system does, later with a message and the code."""
    at_once = end.code in (-signal.SIGHUP, -signal.SIGTERM)
    return "Traceback" not in end.message and (at_once or (end.code == 143 and bool(end.message)))


def measure(
    verb: Verb, work: Path, kills: int, steps: tuple[int, int], only: Sequence[str], known: dict[str, Any], save: Save
) -> None:
    """Fills the cells of a verb in `known`, and saves after each life; `steps` are those of kills and of refusals.

    `only` these cells, or all of them where it is empty.
    """
    matrix = Matrix(verb, work)
    kill_step, refusal_step = steps
    if (known.get("every_nth_write"), known.get("every_nth_refused_write")) != steps:
        known.clear()
    known |= {"every_nth_write": kill_step, "every_nth_refused_write": refusal_step}
    known |= {"seconds_of_an_untouched_life": round(matrix.seconds, 2)}

    def refused(number: int) -> Callable[[Cell], None]:
        return lambda cell: matrix.at_writes(
            cell, save, lambda life, n: fail_from_write(life, n, number), refusal_step, lambda end: end.clear
        )

    cells: dict[str, Callable[[Cell], None]] = {
        "at_every_write": lambda cell: matrix.at_writes(cell, save, die_at_write, kill_step, is_killed),
        "full_disk": refused(errno.ENOSPC),
        "no_rights": refused(errno.EACCES),
        "open_files": lambda cell: matrix.once(cell, save, few_open_files(64), lambda end: end.code == 0 or end.clear),
        "closed_output": lambda cell: matrix.once(cell, save, close_stdout, lambda end: "Traceback" not in end.message),
        "hung_up": lambda cell: matrix.at_random(cell, save, signal.SIGHUP, max(1, kills // 10), is_stopped),
        "asked_to_stop": lambda cell: matrix.at_random(cell, save, signal.SIGTERM, max(1, kills // 10), is_stopped),
        "at_random_moments": lambda cell: matrix.at_random(cell, save, signal.SIGKILL, kills, is_killed),
    }
    for name, fill in cells.items():
        if only and name not in only:
            continue
        started = time.monotonic()
        cell = known.setdefault(name, {"lives": 0, "ends_that_differ": 0, "unclear": 0, "hangs": 0, "first_fault": ""})
        fill(cell)
        print(f"{verb.name} {name} {time.monotonic() - started:.0f} s: {json.dumps(cell)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", nargs="*")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--step", type=int, default=1, help="kill before every n-th write only")
    parser.add_argument("--refusal-step", type=int, default=1, help="refuse from every n-th write on only")
    parser.add_argument("--only", nargs="*", default=(), help="these disturbances only, such as asked_to_stop")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "inputs").mkdir()
        inputs = Inputs.make(work / "inputs")
        verbs = inputs.verbs()
        import_all()
        if "predict" in (given.verb or ["predict"]):
            end = live(verbs["finetune"].command(inputs.root), work / "stderr")
            assert end.code == 0, end.message
            verbs["predict"] = inputs.predict()
        for verb in given.verb or verbs:
            found = _read(given.out).get(verb, {})

            def save(found: dict[str, Any] = found, verb: str = verb) -> None:
                if given.out:  # read anew: verbs may be measured by several processes
                    write_json(given.out, _read(given.out) | {verb: found})

            measure(verbs[verb], work / verb, given.kills, (given.step, given.refusal_step), given.only, found, save)


def _read(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}


if __name__ == "__main__":
    main()
