"""The page of the study, written from the results alone: what is not there is named as missing, never guessed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from octjepa.files import write_atomic
from octjepa.phantom import LESIONS
from octjepa.shipped import shipped

from .aims import MACRO, aims
from .frozen import OF_VAL
from .pairs import Pair, read_pairs
from .plan import ARMS, CURVE, FLUID_FLOORS, POOLS, PRIMARY_POOL, SHIPPED, Settings, finalist
from .results import Results, Row, chosen
from .tables import COLUMNS, FLUID, MISSING, ablations, compared, differences, few, runs, table, used

HOW = """    make study                              # goes on; Ctrl-C keeps what is done, within a run too
    make study ARGS="--list"                # what is done, what remains, how long it takes
    make study ARGS="--only 'main-*'"       # some of it
    OCTJEPA_DATA=FOLDER make study          # with the two real eyes
    make study ARGS="--out DIR --work DIR --people 24 --budget 20 --seeds 0 --threads 1"    # a trial, kept elsewhere

Every figure is in `results.json`, with the run it came from; `runs.json` says what each run was: recipe and overrides,
updates, CPU-seconds given and used, versions, and the hashes of settings, data and code. Cohort, stores and checkpoints
lie in `study/`. An arm's updates follow from its CPU-seconds an update, measured once."""


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
    best, ablated, further = chosen(results, settings)
    found = read_pairs(results.folder)
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
        aims(results, found, ablated or ARMS[0], settings.seeds, settings.ablation_seeds),
        "In brackets the lowest and highest seed, which hold no chance of who is tested; in parentheses the 95 % "
        "interval of people and seeds together, paired by person where it is a difference. The last row is of the "
        "ablations, at their budget. What was tried towards what is missed stands in [the lab log](../../lab/LOG.md): "
        "finer patches, other readings of the same tokens (an attentive probe, every depth, whitening), more "
        "compute, and the ablations below, none of which leads there.",
        *_by_zones(results.folder),
        "## Rows at equal compute",
        table(results, rows, COLUMNS),
        used(results, rows),
        "![Macro lesion AUROC of every run with its interval](lesions.svg)",
        "Linear probes on frozen features, fitted on training people, measured on test people. Within a vendor: only "
        "eyes of one vendor are ranked against each other. No lesion of these eyes has to do with the vendor, but by "
        "chance one is commoner among a vendor's training eyes and rarer among its test eyes; a probe that reads the "
        "vendor is then led below 0.5. What is below 0.5 within a vendor as well may be chance of who is tested: "
        "`python -m benchmarks.study.splits` deals the people anew (lab/LOG.md has what it found of drusen). "
        "Vendor left out: fall "
        "of AUROC within a vendor when none of its eyes has a label (the encoder saw them, unlabelled; the probe also "
        "has a quarter fewer people). Vendor readable: balanced accuracy, low is good. Layer Dice of `majority` is the "
        "commonest layer at each place; the heads of the other rows know the place, too. `supervised` without a vendor "
        "would need four more trainings: not tried; it takes the epoch that is best on the labels of the validation "
        f"people. `{SHIPPED}` is the encoder in the package, weights in 16 bit: the run `{_shipped_run()}`.",
        "## Compared",
        compared(results, found, ablated or ARMS[0]),
        "## Each lesion (AUROC)",
        table(results, rows, lesions),
        "The same, of eyes within a vendor:",
        table(results, rows, {f"{metric}_within_vendor": name for metric, name in lesions.items()}),
        "## Few labels (macro AUROC)",
        "Half of the people, or all there are, have the lesion; mean of three draws. `supervised` is trained from "
        "nothing, all five lesions at once, at a quarter of the budget: one draw and one seed, in which fewer than "
        "half of the people have each lesion, and the labels of the validation people choose its epoch.",
        few(results, settings),
        "## Pooling (macro AUROC)",
        table(results, [*encoders, SHIPPED], pools),
        "The same on validation people, who choose; they are a tenth of all, and few of them have a rare lesion:",
        table(results, [*encoders, SHIPPED], {f"{metric}{OF_VAL}": pool for metric, pool in pools.items()}),
        f"## Compute: {best or 'the best arm'}",
        table(results, curve, COLUMNS) if best else later,
        f"## Ablations: {ablated or 'the best arm that predicts features'}",
        f"{settings.ablation_budget / 60:.3g} CPU-minutes each, so that a cheaper update gives more of them. "
        "Differences are to `reference`, seed by seed [lowest, highest], of test people also with the 95 % interval of "
        "people and seeds; validation people choose, test people tell. "
        f"`warm_start` begins with `{SHIPPED}`, which had 20 CPU-minutes on the same training people.",
        *(
            [
                differences(results, found, ablations(ablated)[0], ablations(ablated)[1:]),
                table(results, ablations(ablated), COLUMNS),
            ]
            if ablated
            else [later]
        ),
        "## What validation people prefer, at the main budget",
        "Ablations that were better than `reference` on validation people with every seed, trained for "
        f"{settings.budget / 60:.3g} CPU-minutes as well. Differences are to the main row of the same arm.",
        _finalists(results, found, ablated, further) if ablated else later,
        "## Real eyes: fluid",
        "A head learns from one of two Duke eyes with macular oedema and is asked about the other. Dice over the "
        "B-scans of both directions, on the grid of the study (0.0078 x 0.047 mm; the pitch of 0.36 mm is not in the "
        "files), so not to be held against published figures. Two eyes: the interval is over B-scans, and "
        "says nothing of other people. "
        f"`unet` has {settings.unet_budget / 60:.3g} CPU-minutes each way. `further_real` was also pretrained, without "
        "labels, on the very volumes it is asked about.",
        table(results, [*encoders, *([f"{best}:further_real"] if best else []), *FLUID_FLOORS], FLUID),
        "## Runs",
        runs(results),
    ]
    return "\n\n".join(parts) + "\n"


def _setup(results: Results, settings: Settings) -> str:
    told = (
        f"{settings.people} phantom people (`{settings.difficulty}` lesions, seed {settings.cohort_seed}), both eyes, "
        f"four vendors, people split 0.6 / 0.1 / 0.3. {settings.budget / 60:.3g} CPU-minutes a run on "
        f"{settings.threads} threads, seeds {', '.join(map(str, settings.seeds))}. The arm of the curve is chosen on "
        "validation people, that of the ablations among those that predict features."
    )
    wanted = [arm for arm in settings.arms if not results.values(arm, "vendor_accuracy")]
    return told + (f"\n\n**Not run yet:** {', '.join(wanted)}." if wanted else "")


def _by_zones(folder: Path) -> list[str]:
    """What the other reading says of the rows below, where it was measured."""
    path = folder / "zones.json"
    if not path.is_file():
        return []
    rows = [one for entry in json.loads(path.read_text(encoding="utf-8"))["entries"].values() for one in entry["rows"]]

    def macro(arm: str) -> str:
        found = [one["value"] for one in rows if (one["arm"], one["metric"]) == (f"{arm}:zones", MACRO)]
        return f"{sum(found) / len(found):.3f}" if found else MISSING

    arms = ", ".join(f"`{arm}` {macro(arm)}" for arm in ARMS)
    return [
        "**How tokens are read decides more than how they were made.** AUROC, ECE, vendor and fovea below weigh all "
        f"tokens of an eye alike. [Read by zone](zones.md), the same tokens give {arms}; an untrained encoder gives "
        f"{macro('untrained')}, and "
        f"the grey of the patches without any network {macro('intensity')}. So most of what a trained encoder gains "
        "below is what that reading loses of place; above an untrained encoder read by zone stands little."
    ]


def _finalists(results: Results, found: list[Pair], arm: str, words: Sequence[str]) -> str:
    if not words:
        return "None is, or the ablations are not complete."
    rows = [finalist(arm, word) for word in words]
    return f"{differences(results, found, arm, rows)}\n\n{table(results, [arm, *rows], COLUMNS)}"


def _shipped_run() -> str:
    folder = shipped(SHIPPED)
    return MISSING if folder is None else str(json.loads((folder / "run.json").read_text(encoding="utf-8"))["run"])


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
