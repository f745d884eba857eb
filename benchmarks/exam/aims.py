"""The aims of the exam, and what the package's encoder reaches: a table for the pages.

The verdicts follow from the figures alone. An aim whose figures are not there has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from .results import NO_PATCH, SUPERVISED, UNTRAINED, Results, RowName, compare, difference_text, digits_of

LONGER, SHORTER = "mae_long", "mae"  # encoders that differ in their updates alone


class Aim(NamedTuple):
    """One figure against one other row, or alone.

    how: ratio of the means over seeds; paired difference, whose interval has to be above `low`; the figure alone,
    whose interval has to be above `low` where that is given; every: each seed against the other row's same seed. bound:
    what the figure has to reach, or to stay under where `less` is better. their_key: the other row's figure, where it
    is not the same one.
    """

    text: str
    key: str
    against: str | None
    how: Literal["ratio", "difference", "alone", "every"]
    bound: float
    low: float | None = None
    less: bool = False
    their_key: str | None = None


_FLOORS = (("intensity", "intensity"), ("raw_patches", "raw patches"))
AIMS = (
    Aim("token AP from 30 eyes: 3 times random initialisation's", "token_lesion/token_ap/30", UNTRAINED, "ratio", 3),
    Aim("token AP from 30 eyes: 3 times intensity's", "token_lesion/token_ap/30", "intensity", "ratio", 3),
    Aim(
        "AUROC of an eye, all five lesions, 30 people: 0.10 above random initialisation, lower limit above 0.05",
        "eye_lesion/auroc/30",
        UNTRAINED,
        "difference",
        0.10,
        0.05,
    ),
    Aim(
        "the same, random initialisation by its better pooling, zones_centered",
        "eye_lesion/auroc/30",
        UNTRAINED,
        "difference",
        0.10,
        0.05,
        their_key="eye_lesion_centered/auroc/30",
    ),
    Aim("the same, both by zones_centered", "eye_lesion_centered/auroc/30", UNTRAINED, "difference", 0.10, 0.05),
    Aim("the same of the admitted lesions", "eye_lesion/auroc_admitted/30", UNTRAINED, "difference", 0.10, 0.05),
    *(
        Aim(f"added to intensity, {labels} people: above 0", f"added_value/added_auroc/{labels}", None, "alone", 0, 0)
        for labels in ("10", "30", "100", "all")
    ),
    Aim("admitted decoys, 100 people: 0.80", "decoys/auroc_admitted/100", None, "alone", 0.80),
    Aim(
        "surfaces from 30 eyes: 0.7 of the error of random initialisation",
        "surfaces/error_um/30",
        UNTRAINED,
        "ratio",
        0.7,
        less=True,
    ),
    Aim("the same eye, top-1: 3 times random initialisation's", "same_eye/top_1/0", UNTRAINED, "ratio", 3),
    *(
        Aim(
            f"tuned, {labels} people, {name}: 0.05 above tuning from random weights, lower limit above 0",
            f"{key}/{labels}",
            UNTRAINED,
            "difference",
            0.05,
            0,
        )
        for key, name in (("tuning/auroc", "AUROC"), ("tuning_segmentation/dice", "Dice"))
        for labels in ("30", "100")
    ),
    *(
        Aim(f"real fluid, {name}: above {label}, every seed", f"real_fluid/{metric}/1", other, "every", 0)
        for metric, name in (("ap", "AP"), ("dice", "Dice"))
        for other, label in ((UNTRAINED, "random initialisation"), *_FLOORS, (SUPERVISED, "a U-Net"))
    ),
    *(
        Aim(
            f"real fluid by a decoder, {name}: above {label}, every seed",
            f"real_fluid_decoder/{metric}/1",
            other,
            "every",
            0,
            their_key=None if other != SUPERVISED else f"real_fluid/{metric}/1",
        )
        for metric, name in (("ap", "AP"), ("dice", "Dice"))
        for other, label in (
            (UNTRAINED, "random initialisation"),
            ("intensity", "the same without tokens"),
            (SUPERVISED, "a U-Net"),
        )
    ),
    *(
        Aim(f"real surfaces: below {label}, every seed", "real_surfaces/error_um/1", other, "every", 0, less=True)
        for other, label in ((UNTRAINED, "random initialisation"), *_FLOORS)
    ),
)


def aims_lines(results: Results, name: str, left_out: Sequence[str] = ()) -> list[list[str]]:
    """[aim, figure, verdict] of the encoder `name`; without the tasks `left_out`."""
    lines = []
    for aim in AIMS:
        if aim.key.partition("/")[0] in left_out:
            continue
        found = _figure(results, name, aim)
        text, met = found if found is not None else ("missing", None)
        lines.append([aim.text, text, {None: "missing", True: "met", False: "missed"}[met]])
    if not left_out:
        lines += _compute_lines(results)
    return lines


def _figure(results: Results, name: str, aim: Aim) -> tuple[str, bool] | None:
    """What is there of an aim, and whether it is met; None where a figure is missing."""
    ours = results.values(name, aim.key)
    patches = {NO_PATCH, *(row.patch for row in ours)}
    theirs = {} if aim.against is None else results.values(aim.against, aim.their_key or aim.key, patches)
    if not ours or (aim.against is not None and not theirs):
        return None
    one = float(np.mean(list(ours.values())))
    digits = digits_of(aim.key)
    if aim.how == "alone":
        low = min(_low(results, row, aim.key) for row in ours)
        met = one >= aim.bound if aim.low is None else low > aim.low
        return f"{one:.{digits}f}" + ("" if aim.low is None else f" (lowest limit {low:.{digits}f})"), met
    if aim.how == "ratio":
        other = float(np.mean(list(theirs.values())))
        met = one / other <= aim.bound if aim.less else one / other >= aim.bound
        return f"{one:.{digits}f} / {other:.{digits}f} = {one / other:.2f}", met
    pairs = [(row, _same_seed(theirs, row)) for row in ours]
    known = [(row, other) for row, other in pairs if other is not None]
    if not known:
        return None
    found = compare(results, [row for row, _ in known], [other for _, other in known], aim.key, aim.their_key)
    if aim.how == "every":
        apart = [ours[row] - theirs[other] for row, other in known]
        text = ", ".join(f"{ours[row]:.{digits}f} against {theirs[other]:.{digits}f}" for row, other in known)
        if found is not None and found.low is not None:
            text += f"; {difference_text(found, digits)}"
        return text, all(x < 0 if aim.less else x > 0 for x in apart)
    assert found is not None  # both sides were read
    assert found.difference is not None
    low = -np.inf if found.low is None else found.low
    return difference_text(found, digits), bool(found.difference >= aim.bound and low > (aim.low or 0))


def _compute_lines(results: Results) -> list[list[str]]:
    """Whether every seed of the longer training is above every seed of the shorter."""
    lines = []
    for key, heading in (
        ("token_lesion/token_ap/30", "token AP, 30 eyes"),
        ("eye_lesion_centered/auroc/30", "AUROC by zones_centered, 30"),
    ):
        long, short = (list(results.values(name, key).values()) for name in (LONGER, SHORTER))
        text = f"{heading}: six times the updates of `{SHORTER}` above its seeds"
        if not long or not short:
            lines.append([text, "missing", "missing"])
            continue
        found = f"{', '.join(f'{x:.3f}' for x in long)} against {', '.join(f'{x:.3f}' for x in short)}"
        lines.append([text, found, "met" if min(long) > max(short) else "missed"])
    return lines


def _same_seed(rows: dict[RowName, float], ours: RowName) -> RowName | None:
    """The row of the same seed, or the only one of a row without seeds."""
    if len(rows) == 1:
        return next(iter(rows))
    return next((row for row in rows if row.seed == ours.seed), None)


def _low(results: Results, row: RowName, key: str) -> float:
    low = results.entry(row, key).low
    return float("-inf") if low is None else float(low)
