"""What the study was to reach, set before it ran, beside what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from .pairs import Pair, told_interval
from .results import Results, minus, spread

MACRO = "lesion_auroc_macro"


def aims(results: Results, found: list[Pair], arm: str, seeds: Sequence[int], ablation_seeds: Sequence[int]) -> str:
    """A Markdown table of the aims of `arm`: mean over seeds [lowest, highest] (95 % of people and seeds)."""
    all_, third, drop = f"{arm}:tokens_all", f"{arm}:tokens_third", "leave_vendor_out_drop"
    rows: list[tuple[str, str, str | None, str, str, Callable[[float], bool], Sequence[int]]] = [
        (f"{arm}, frozen: lesion AUROC", arm, None, MACRO, "at least 0.90", lambda value: value >= 0.90, seeds),
        ("untrained: lesion AUROC", "untrained", None, MACRO, "at most 0.65", lambda value: value <= 0.65, seeds),
        *(
            (f"{arm} minus {other}", arm, other, MACRO, "at least 0.05", lambda value: value >= 0.05, seeds)
            for other in ("mae", "normalized_mse")
            if other != arm
        ),
        (f"{arm}: loss of leaving a vendor out", arm, None, drop, "at most 0.03", lambda value: value <= 0.03, seeds),
        (
            f"{arm}: all tokens minus a third of them, of tissue", all_, third, MACRO, "at most 0.01",
            lambda value: value <= 0.01, ablation_seeds,
        ),
    ]  # fmt: skip
    lines = ["| | found | aim | |", "|---|---|---|---|"]
    for name, ours, other, metric, wanted, holds, needed in rows:
        values = results.values(ours, metric)
        if other is not None:
            values = minus(values, results.values(other, metric))
        told = spread(values.values()) + told_interval(found, ours, other, metric) if values else "missing"
        lines.append(f"| {name} | {told} | {wanted} | {_verdict(values, holds, needed)} |")
    return "\n".join(lines)


def _verdict(values: Mapping[int, float], holds: Callable[[float], bool], needed: Sequence[int]) -> str:
    """Of the mean; in doubt where single seeds say otherwise. Says nothing before every seed is there."""
    if not set(needed) <= set(values):
        return f"{len(set(needed) & set(values))} of {len(needed)} seeds"
    known = [values[seed] for seed in needed]
    met = holds(mean(known))
    doubt = "" if all(holds(value) == met for value in known) else ", not by every seed"
    return ("met" if met else "missed") + doubt
