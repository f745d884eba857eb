"""A folder of decoys: the tree and tables of a cohort, one eye a person, half of the eyes with the lesion."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal

from octjepa.errors import UsageError
from octjepa.keys import key
from octjepa.phantom.cohort import (
    TRUTH_COLUMNS,
    EyeTask,
    check_request,
    participant_rows,
    split_people,
    write_eyes,
    write_tables,
)
from octjepa.phantom.decoys import DECOYS, Decoy, make_decoy
from octjepa.phantom.person import EYES
from octjepa.recipe import DEVICES

DECOY_COLUMNS: Final = (*TRUTH_COLUMNS, "decoy_kind", "decoy_member")


def write_decoys(
    out: Path,
    kind: Decoy,
    people: int,
    seed: int = 0,
    devices: Sequence[str] = DEVICES,
    split_shares: tuple[float, float, float] = (0.7, 0.15, 0.15),
    workers: int = 1,
) -> dict[str, int]:
    """Writes one eye of `people` persons, each with the lesion of `kind` or with its decoy.

    Both are equally frequent, to one eye, in each split on each device, and right and left eyes take turns.
    truth/eyes.tsv has the columns `decoy_kind` and `decoy_member` (1 the lesion, 0 the decoy) besides.
    Equal arguments give equal bytes, whatever the number of workers.
    Returns {"people", "volumes", "files"}. Raises UsageError as `write_cohort` does, or for an unknown kind.
    """
    check_request(out, people, devices, "small", split_shares, workers, 0)
    if kind not in DECOYS:
        raise UsageError(f"decoy {kind!r} is unknown: expected one of {', '.join(DECOYS)}")
    members = _members(seed, kind, people, len(devices), split_shares)
    tasks = []
    for person in range(people):
        laterality, device = EYES[person // len(devices) % 2], devices[person % len(devices)]
        draw = partial(make_decoy, seed, person, kind, members[person], laterality, device, "small")
        columns = {"decoy_kind": kind, "decoy_member": members[person]}
        tasks.append(EyeTask(out, seed, draw, columns=columns))
    written = write_eyes(out, tasks, workers)
    participants = participant_rows(seed, people, devices, split_shares, "realistic")
    write_tables(out, written, participants, DECOY_COLUMNS)
    return {"people": people, "volumes": people, "files": people}


def _members(
    seed: int, kind: Decoy, people: int, devices: int, shares: tuple[float, float, float]
) -> dict[int, Literal[0, 1]]:
    """Person -> member: they alternate in a random order of the right, then of the left eyes of a split and device."""
    split_of = split_people(seed, people, devices, shares)
    groups: dict[tuple[str, int], list[int]] = {}
    for person in range(people):
        groups.setdefault((split_of[person], person % devices), []).append(person)
    members: dict[int, Literal[0, 1]] = {}
    for number, group in enumerate(groups.values()):
        order = sorted(group, key=lambda person: (person // devices % 2, key("phantom decoy", seed, kind, person)))
        members.update({person: 1 if (turn + number) % 2 else 0 for turn, person in enumerate(order)})
    return members
