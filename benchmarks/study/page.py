"""The page of the study, written from the results alone: what is not there is named as missing, never guessed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from octjepa.phantom import LESIONS
from octjepa.store.disk import write_atomic

from .aims import MACRO, aims
from .frozen import OF_VAL
from .plan import ABLATIONS, ARMS, CURVE, FEW_PEOPLE, FLUID_FLOORS, POOLS, PRIMARY_POOL, SHIPPED, SUPERVISED, Settings
from .results import Results, Row, chosen, minus, spread

COLUMNS = {
    "lesion_auroc_macro": "lesion AUROC", "lesion_auroc_macro_within_vendor": "within a vendor",
    "lesion_ece_macro": "ECE", "leave_vendor_out_drop": "vendor left out, loss",
    "vendor_accuracy": "vendor readable", "fovea_error_mm": "fovea, mm", "layer_dice": "layer Dice",
    "lesion_dice": "lesion Dice",
}  # fmt: skip
FLUID = {
    "fluid_dice_real": "fluid Dice", "fluid_dice_real_01_to_04": "01 to 04", "fluid_dice_real_04_to_01": "04 to 01",
}  # fmt: skip
HOW = """    make study                              # goes on; Ctrl-C keeps what is done, within a run too
    make study ARGS="--list"                # what is done, what remains, how long it takes
    make study ARGS="--only 'main-*'"       # some of it
    OCTJEPA_DATA=FOLDER make study          # with the two real eyes
    make study ARGS="--out DIR --work DIR --people 24 --budget 20 --seeds 0 --threads 1"    # a trial, kept elsewhere

Every figure is in `results.json`, with the run it came from; `runs.json` says what each run was: recipe and overrides,
updates, CPU-seconds given and used, versions, and the hashes of settings, data and code. Cohort, stores and checkpoints
lie in `study/`. An arm's updates follow from its CPU-seconds an update, measured once."""
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


def write_page(results: Results, settings: Settings, out: Path) -> None:
    """README.md and lesions.svg in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    text = page(results, settings)
    write_atomic(out / "README.md", lambda file: file.write(text.encode()))
    drawing = dots(
        [one for one in results.rows if one["metric"] == "lesion_auroc_macro" and one["arm"] in settings.arms]
    )
    write_atomic(out / "lesions.svg", lambda file: file.write(drawing.encode()))


def page(results: Results, settings: Settings) -> str:
    """The whole page."""
    best, ablated = chosen(results, settings)
    later = f"{MISSING}: the main rows come first."
    encoders = [arm for arm in settings.arms if arm in (*ARMS, "untrained")]
    rows = [*settings.arms, SHIPPED]
    lesions = {f"lesion_auroc_{name}": name.replace("_", " ") for name in LESIONS}
    pools = {"lesion_auroc_macro" if pool == PRIMARY_POOL else f"lesion_auroc_macro_{pool}": pool for pool in POOLS}
    curve = [f"{best}:cpu_{settings.budget * share / 60:.3g}_min" for share in CURVE] + [str(best)]
    parts = [
        "# The study: what each objective teaches",
        "Written by `make study` from `results.json`; do not edit. A cell is the mean over seeds [lowest, highest], or "
        'of one run the value (95 % interval by person). "missing" has not been run, "-" is no figure of that row.',
        _setup(results, settings),
        HOW,
        "## What it was to reach",
        aims(results, ablated or ARMS[0], settings.seeds, settings.ablation_seeds),
        "## Rows at equal compute",
        table(results, rows, COLUMNS),
        "![Macro lesion AUROC of every run with its interval](lesions.svg)",
        "Linear probes on frozen features, fitted on training people, measured on test people. Within a vendor: only "
        "eyes of one vendor are ranked against each other. No lesion of these eyes has to do with the vendor, but by "
        "chance one is commoner among a vendor's training eyes and rarer among its test eyes; a probe that reads the "
        "vendor is then led below 0.5. Vendor left out: fall "
        "of AUROC within a vendor when none of its eyes has a label (the encoder saw them, unlabelled; the probe also "
        "has a quarter fewer people). Vendor readable: balanced accuracy, low is good. Layer Dice of `majority` is the "
        "commonest layer at each place; the heads of the other rows know the place, too. `supervised` without a vendor "
        f"would need four more trainings: not tried. `{SHIPPED}` is the encoder in the package, from a run of an "
        "earlier state of this study, on the same training people; its card tells.",
        "## Each lesion (AUROC)",
        table(results, rows, lesions),
        "The same, of eyes within a vendor:",
        table(results, rows, {f"{metric}_within_vendor": name for metric, name in lesions.items()}),
        "## Few labels (macro AUROC)",
        "Half of the people, or all there are, have the lesion; mean of three draws. `supervised` is trained from "
        "nothing on so many people, at a quarter of the budget.",
        _few(results, settings),
        "## Pooling (macro AUROC)",
        table(results, [*encoders, SHIPPED], pools),
        "The same on validation people, who choose:",
        table(results, [*encoders, SHIPPED], {f"{metric}{OF_VAL}": pool for metric, pool in pools.items()}),
        f"## Compute: {best or 'the best arm'}",
        table(results, curve, COLUMNS) if best else later,
        f"## Ablations: {ablated or 'the best arm that predicts features'}",
        f"{settings.ablation_budget / 60:.3g} CPU-minutes each, so that a cheaper update gives more of them. "
        "Differences are to `reference`, seed by seed; validation people choose, test people tell.",
        *([_differences(results, ablated), table(results, _ablations(ablated), COLUMNS)] if ablated else [later]),
        "## Real eyes: fluid",
        "A head learns from one of two Duke eyes with macular oedema and is asked about the other. Dice over the "
        "B-scans of both directions. Two eyes: the interval is over B-scans, and says nothing of other people. "
        "`further_real` was also pretrained, without labels, on the very volumes it is asked about.",
        table(results, [*encoders, *([f"{best}:further_real"] if best else []), *FLUID_FLOORS], FLUID),
        "## Runs",
        _runs(results),
    ]
    return "\n\n".join(parts) + "\n"


def _ablations(arm: str) -> list[str]:
    return [f"{arm}:{name}" for name in ABLATIONS]


def _differences(results: Results, arm: str) -> str:
    """Each ablation against the reference."""
    lines = [
        "| row | updates | lesion AUROC, validation | test | fovea, mm | lesion Dice |",
        "|---|---|---|---|---|---|",
    ]
    reference, *others = _ablations(arm)
    for name in others:
        updates = {
            results.runs[one["run"]].get("updates", 0) for one in results.rows if one["arm"] == name
        }  # fmt: skip
        found = [
            minus(results.values(name, metric), results.values(reference, metric))
            for metric in (f"{MACRO}{OF_VAL}", MACRO, "fovea_error_mm", "lesion_dice")
        ]
        told = [f"{spread(values.values(), sign=True)}" if values else MISSING for values in found]
        lines.append(f"| {name} | {', '.join(map(str, sorted(updates))) or MISSING} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def _few(results: Results, settings: Settings) -> str:
    names = {f"few_label_auroc_{size}": f"{size} people" for size in FEW_PEOPLE}
    shown = table(results, [arm for arm in (*settings.arms, SHIPPED) if arm != SUPERVISED], names)
    if SUPERVISED not in settings.arms:
        return shown
    own = [cell(results, f"{SUPERVISED}:people_{size}", f"few_label_auroc_{size}") for size in FEW_PEOPLE]
    return f"{shown}\n| {SUPERVISED} | " + " | ".join(own) + " |"


def _setup(results: Results, settings: Settings) -> str:
    told = (
        f"{settings.people} phantom people (`{settings.difficulty}` lesions, seed {settings.cohort_seed}), both eyes, "
        f"four vendors, people split 0.6 / 0.1 / 0.3. {settings.budget / 60:.3g} CPU-minutes a run on "
        f"{settings.threads} threads, seeds {', '.join(map(str, settings.seeds))}. The arm of the curve is chosen on "
        "validation people, that of the ablations among those that predict features."
    )
    wanted = [arm for arm in settings.arms if not results.values(arm, "vendor_accuracy")]
    return told + (f"\n\n**Not run yet:** {', '.join(wanted)}." if wanted else "")


def _runs(results: Results) -> str:
    lines = ["| run | updates | CPU s | alarms | ended |", "|---|---|---|---|---|"]
    for name, about in sorted(results.runs.items()):
        alarms = about.get("alarms") or "-"
        alarms = ", ".join(alarms) if isinstance(alarms, list | dict) else alarms
        lines.append(
            f"| {name} | {about.get('updates', '-')} | {about.get('cpu_seconds', '-')} | {alarms} | {about['ended']} |"
        )
    return "\n".join(lines) if results.runs else MISSING


def dots(rows: Sequence[Row]) -> str:
    """An SVG: a line per run, its value a dot, its interval a bar, from 0.4 to 1."""
    known = [one for one in rows if one["value"] is not None]
    left, width, pitch = 170, 420, 18
    height = 34 + pitch * len(known)

    def x(value: float) -> float:
        return left + width * (min(max(value, 0.4), 1.0) - 0.4) / 0.6

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 60} {height}" '
        'font-family="sans-serif" font-size="12" fill="#222">'
    ]
    for tick in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        parts.append(f'<line x1="{x(tick):.0f}" x2="{x(tick):.0f}" y1="4" y2="{height - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(tick):.0f}" y="{height - 6}" text-anchor="middle">{tick}</text>')
    for number, one in enumerate(known):
        y = 14 + pitch * number
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{one["arm"]} {one["seed"]}</text>')
        if one["low"] is not None:
            parts.append(f'<line x1="{x(one["low"]):.1f}" x2="{x(one["high"]):.1f}" y1="{y}" y2="{y}" stroke="#888"/>')
        parts.append(f'<circle cx="{x(one["value"]):.1f}" cy="{y}" r="4" fill="#1f6f8b"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"
