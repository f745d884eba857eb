"""The campaign's page: every figure that was found, what failed, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import rule
from .campaign import Campaign, Step

PARTS = {
    "right": "Is it right",
    "fast": "Is it fast",
    "learn": "Does it learn",
    "recipe": "The recipe that people will use",
}
_DEPTH = 3  # of nested figures that are written out


def write_page(campaign: Campaign, steps: Sequence[Step]) -> None:
    """campaign.md beside the results."""
    (campaign.out / "campaign.md").write_text("\n".join(page(campaign.results, steps)) + "\n", encoding="utf-8")


def page(results: Mapping[str, Any], steps: Sequence[Step]) -> Iterable[str]:
    """The page, line by line."""
    rehearsed = results["settings"] != "full"
    yield "# One GPU: what was measured"
    yield ""
    if rehearsed:
        yield f"A rehearsal ({results['settings']}) on a CPU: every step runs. No figure here is a result."
        yield ""
    yield "Written by `scripts/gpu/campaign`; do not edit. The rule of part 3 was written before any figure:"
    yield ""
    yield from (f"    {line}" if line else "" for line in (rule.__doc__ or "").strip().splitlines())
    for part, title in PARTS.items():
        yield from ("", f"## {title}", "")
        yield from ("| step | state | seconds | figures |", "|---|---|---|---|")
        for step in steps:
            if step.part == part:
                yield _row(step.name, results["steps"].get(step.name))


def _row(name: str, entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return f"| {name} | missing | | |"
    figures = entry.get("figures", {})
    state = entry["state"]
    if figures.get("right") is False:
        state = "**not right**"
    text = entry.get("error") or "; ".join(_flat(figures))
    return f"| {name} | {state} | {entry['seconds']:g} | {text.replace('|', '/')} |"


def _flat(figures: Mapping[str, Any], before: str = "", depth: int = 0) -> Iterable[str]:
    for key, value in figures.items():
        if isinstance(value, Mapping) and depth < _DEPTH:
            yield from _flat(value, f"{before}{key} ", depth + 1)
        elif isinstance(value, float):
            yield f"{before}{key} {value:.4g}"
        else:
            yield f"{before}{key} {value}"
