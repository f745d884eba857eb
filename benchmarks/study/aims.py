"""What the study was to reach, set before it ran, beside what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from .results import Results, minus, spread

MACRO = "lesion_auroc_macro"


def aims(results: Results, arm: str, seeds: Sequence[int], ablation_seeds: Sequence[int]) -> str:
    """A Markdown table of the aims of `arm`: mean over seeds [lowest, highest], differences seed by seed."""

    def of(name: str, metric: str = MACRO) -> dict[int, float]:
        return results.values(name, metric)

    rows: list[tuple[str, Mapping[int, float], str, Callable[[float], bool], Sequence[int]]] = [
        (f"{arm}, frozen: lesion AUROC", of(arm), "at least 0.90", lambda value: value >= 0.90, seeds),
        ("untrained: lesion AUROC", of("untrained"), "at most 0.65", lambda value: value <= 0.65, seeds),
        *(
            (f"{arm} minus {other}", minus(of(arm), of(other)), "at least 0.05", lambda value: value >= 0.05, seeds)
            for other in ("mae", "normalized_mse")
            if other != arm
        ),
        (
            f"{arm}: loss of leaving a vendor out", of(arm, "leave_vendor_out_drop"), "at most 0.03",
            lambda value: value <= 0.03, seeds,
        ),
        (
            f"{arm}: all tokens minus a third of them, of tissue",
            minus(of(f"{arm}:tokens_all"), of(f"{arm}:tokens_third")), "at most 0.01",
            lambda value: value <= 0.01, ablation_seeds,
        ),
    ]  # fmt: skip
    lines = ["| | found | aim | |", "|---|---|---|---|"]
    for name, values, wanted, holds, needed in rows:
        found = spread(values.values()) if values else "missing"
        lines.append(f"| {name} | {found} | {wanted} | {_verdict(values, holds, needed)} |")
    return "\n".join(lines)


def _verdict(values: Mapping[int, float], holds: Callable[[float], bool], needed: Sequence[int]) -> str:
    """Of the mean; in doubt where single seeds say otherwise. Says nothing before every seed is there."""
    if not set(needed) <= set(values):
        return f"{len(set(needed) & set(values))} of {len(needed)} seeds"
    known = [values[seed] for seed in needed]
    met = holds(mean(known))
    doubt = "" if all(holds(value) == met for value in known) else ", not by every seed"
    return ("met" if met else "missed") + doubt
