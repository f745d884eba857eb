"""How the campaign decides whether an encoder has learned: written before any run on a GPU, and not changed after one.

`learns`: the best encoder at its last milestone is above its untrained twin by at least 0.05 AUROC with all labelled
people, or by 0.10 with 30, with a lower limit of the 95 % interval above 0.02, and by more than at its first milestone.
`tokens_were_the_cause`: fine tokens are ahead of coarse ones by 0.03 at equal views. `latent_objective_fails`: `vjepa`
is 0.03 or more behind `mae` at the last milestone. A figure that is missing decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ALL, FEW = "eye_lesion/auroc/all", "eye_lesion/auroc/30"
GAIN = {ALL: 0.05, FEW: 0.10}
LOWER_LIMIT = 0.02
FINE_OVER_COARSE = 0.03
LATENT_BEHIND = 0.03
COARSE = "mae_coarse"


class Gain(NamedTuple):
    """A figure of an encoder, and its difference to the untrained twin with the lower limit of that."""

    value: float
    gain: float
    low: float


Gains = Mapping[tuple[str, int, str], Gain]  # (encoder, milestone, figure)


def decide(gains: Gains, milestones: tuple[int, ...]) -> dict[str, str]:
    """Each question -> yes, no or undecided, and why."""
    return {
        "learns": _learns(gains, milestones),
        "tokens_were_the_cause": _ahead(gains, "mae", COARSE, milestones[-1], FINE_OVER_COARSE),
        "latent_objective_fails": _ahead(gains, "mae", "vjepa", milestones[-1], LATENT_BEHIND),
    }


def _learns(gains: Gains, milestones: tuple[int, ...]) -> str:
    first, last = milestones[0], milestones[-1]
    outcomes = []
    for figure, needed in GAIN.items():
        known = {name: one for (name, at, what), one in gains.items() if (at, what) == (last, figure)}
        if not known:
            outcomes.append(f"undecided: {figure} was not measured at the last milestone")
            continue
        name = max(known, key=lambda encoder: known[encoder].gain)
        best, before = known[name], gains.get((name, first, figure))
        text = f"{name} gains {best.gain:+.3f} (from {best.low:+.3f}) of {figure}, {needed:+.2f} is needed"
        if before is None:
            outcomes.append(f"undecided: {text}; it was not measured at the first milestone")
            continue
        rises = best.value > before.value
        good = best.gain >= needed and best.low > LOWER_LIMIT and rises
        outcomes.append(
            f"{'yes' if good else 'no'}: {text}; {before.value:.3f} at the first milestone, {best.value:.3f}"
        )
    for answer in ("yes", "undecided"):
        found = [outcome for outcome in outcomes if outcome.startswith(answer)]
        if found:
            return found[0]
    return "; ".join(outcomes)


def _ahead(gains: Gains, one: str, other: str, at: int, needed: float) -> str:
    a, b = gains.get((one, at, ALL)), gains.get((other, at, ALL))
    if a is None or b is None:
        return f"undecided: {one if a is None else other} was not measured at the last milestone"
    answer = "yes" if a.value - b.value >= needed else "no"
    return f"{answer}: {one} {a.value:.3f}, {other} {b.value:.3f} of {ALL}, {needed:+.2f} is needed"
