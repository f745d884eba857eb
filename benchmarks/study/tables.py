"""The tables of the study's page, from the results alone: what is not there is named as missing, never guessed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .aims import MACRO
from .frozen import OF_VAL, WITHIN
from .pairs import Pair, told_interval
from .plan import ABLATIONS, ARMS, FEW_PEOPLE, POOLS, SHIPPED, SUPERVISED, Settings
from .results import Results, minus, spread

COLUMNS = {
    "lesion_auroc_macro": "lesion AUROC", "lesion_auroc_macro_within_vendor": "within a vendor",
    "lesion_ece_macro": "ECE", "leave_vendor_out_drop": "vendor left out, loss",
    "vendor_accuracy": "vendor readable", "fovea_error_mm": "fovea, mm", "layer_dice": "layer Dice",
    "lesion_dice": "lesion Dice",
}  # fmt: skip
FLUID = {
    "fluid_dice_real": "fluid Dice", "fluid_dice_real_01_to_04": "01 to 04", "fluid_dice_real_04_to_01": "04 to 01",
}  # fmt: skip
MISSING = "missing"
NOT_DEFINED = {
    ("supervised", "leave_vendor_out_drop"), ("supervised", "layer_dice"), ("supervised", "lesion_dice"),
    ("histogram", "layer_dice"), ("histogram", "lesion_dice"), ("majority", "lesion_dice"),
    *(("majority", f"lesion_auroc_macro_{pool}") for pool in POOLS),
    *(("histogram", f"lesion_auroc_macro_{pool}") for pool in POOLS),
    *(("supervised", f"lesion_auroc_macro_{pool}") for pool in POOLS),
}  # fmt: skip


def cell(results: Results, arm: str, metric: str) -> str:
    """Mean over seeds with their lowest and highest; of a single seed its interval over people."""
    if (arm, metric) in NOT_DEFINED:
        return "-"
    rows = [one for one in results.rows if one["arm"] == arm and one["metric"] == metric]
    values = [one["value"] for one in rows if one["value"] is not None]
    if not values:
        return MISSING if not rows else "not measurable"
    if len(values) == 1:
        one = next(one for one in rows if one["value"] is not None)
        return f"{one['value']:.3f}" + (f" ({one['low']:.3f} to {one['high']:.3f})" if one["low"] is not None else "")
    return spread(values)


def table(results: Results, arms: Iterable[str], columns: dict[str, str], first: str = "row") -> str:
    """A Markdown table of `cell`s."""
    lines = [f"| {first} | " + " | ".join(columns.values()) + " |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {arm} | " + " | ".join(cell(results, arm, metric) for metric in columns) + " |" for arm in arms]
    return "\n".join(lines)


def few(results: Results, settings: Settings) -> str:
    names = {f"few_label_auroc_{size}": f"{size} people" for size in FEW_PEOPLE}
    shown = table(results, [arm for arm in (*settings.arms, SHIPPED) if arm != SUPERVISED], names)
    if SUPERVISED not in settings.arms:
        return shown
    own = [cell(results, f"{SUPERVISED}:people_{size}", f"few_label_auroc_{size}") for size in FEW_PEOPLE]
    return f"{shown}\n| {SUPERVISED} | " + " | ".join(own) + " |"


def used(results: Results, rows: Sequence[str]) -> str:
    """What the runs of each row really took: the number of updates was fixed before, from a short measurement."""
    told = []
    for arm in rows:
        runs = {one["run"] for one in results.rows if one["arm"] == arm}
        seconds = [results.runs[run]["cpu_seconds"] for run in runs if results.runs[run].get("cpu_seconds")]
        if seconds:
            told.append(f"`{arm}` {sum(seconds) / len(seconds):.0f}")
    codes = {
        about["code_hash"][:6]
        for about in results.runs.values()
        if (about.get("group"), about.get("kind")) == ("main", "pretrain") and "code_hash" in about
    }
    if not told:
        return MISSING
    return (
        f"CPU-seconds really taken, mean of the runs: {', '.join(told)}. Updates were fixed before, from a short "
        f"measurement alone on the machine. The pretrained rows come from {len(codes)} state(s) of the code "
        f"({', '.join(sorted(codes))})."
    )


def compared(results: Results, found: list[Pair], lead: str) -> str:
    """Arms against `lead` and against untrained encoders: means of seed-wise differences with their intervals."""
    metrics = {
        MACRO: "lesion AUROC", f"{MACRO}{WITHIN}": "within a vendor", "leave_vendor_out_drop": "vendor left out, loss",
        "fovea_error_mm": "fovea, mm", "lesion_dice": "lesion Dice",
    }  # fmt: skip
    which = [(lead, arm) for arm in ARMS if arm != lead] + [(arm, "untrained") for arm in ARMS]
    lines = ["| difference | " + " | ".join(metrics.values()) + " |", "|---" * (1 + len(metrics)) + "|"]
    for arm, other in which:
        cells = [difference(results, found, arm, other, metric) for metric in metrics]
        lines.append(f"| {arm} minus {other} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference(results: Results, found: list[Pair], arm: str, other: str, metric: str) -> str:
    values = minus(results.values(arm, metric), results.values(other, metric))
    return spread(values.values(), sign=True) + told_interval(found, arm, other, metric) if values else MISSING


def ablations(arm: str) -> list[str]:
    return [f"{arm}:{name}" for name in ABLATIONS]


def differences(results: Results, found: list[Pair], reference: str, rows: Sequence[str]) -> str:
    """Each row against the reference."""
    lines = [
        "| row | updates | lesion AUROC, validation | test | fovea, mm | lesion Dice |",
        "|---|---|---|---|---|---|",
    ]
    for name in rows:
        updates = {results.runs[one["run"]].get("updates", 0) for one in results.rows if one["arm"] == name}
        metrics = (f"{MACRO}{OF_VAL}", MACRO, "fovea_error_mm", "lesion_dice")
        cells = [difference(results, found, name, reference, metric) for metric in metrics]
        lines.append(f"| {name} | {', '.join(map(str, sorted(updates))) or MISSING} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def runs(results: Results) -> str:
    lines = ["| run | updates | CPU s | alarms | ended |", "|---|---|---|---|---|"]
    for name, about in sorted(results.runs.items()):
        alarms = about.get("alarms") or "-"
        alarms = ", ".join(alarms) if isinstance(alarms, list | dict) else alarms
        lines.append(
            f"| {name} | {about.get('updates', '-')} | {about.get('cpu_seconds', '-')} | {alarms} | {about['ended']} |"
        )
    return "\n".join(lines) if results.runs else MISSING
