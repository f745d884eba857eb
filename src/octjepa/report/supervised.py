"""The sections that a fine-tuning or a segmentation adds to the page: its results next to their references, B-scans,
thickness.

Everything is read from the folder that `octjepa finetune` or `octjepa segment` wrote; labels and encoder need not exist
any more.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from markupsafe import Markup

from octjepa.errors import OctjepaError, VolumeRejected
from octjepa.report.contents import Missing, ProbeContents, Training
from octjepa.report.figures import forest, svg
from octjepa.tables import plain_cell
from octjepa.tasks.segment.result import ChosenHead, ShownBScan

_TUNING_REFERENCES = {
    "frozen": "a linear probe on the same encoder frozen",
    "best_baseline": "{0}, the best baseline on these very people, which favours it",
    "tuned_from_scratch": "the same network tuned from its first weights",
}
_SEGMENTATION_REFERENCES = {
    "untrained": "the same head on the untrained encoder",
    "intensity": "the same head on intensities only",
    "position_prior": "the most frequent class of each position (it does not use the image)",
}


@dataclass(frozen=True)
class BScan:
    """One B-scan three times (as it is, with the true labels, with the predicted labels) and the rule that chose it."""

    sentence: str
    pictures: tuple[tuple[str, Markup], ...]
    stretch: float


@dataclass(frozen=True)
class SectorThickness:
    """Mean thickness of a class by ETDRS sector over the test scans: {sector: (predicted, true, scans)} in um."""

    label: str
    means: dict[str, tuple[float, float, int]]


def tuning_section(tuning: Training, probe: ProbeContents) -> dict[str, object]:
    """The results under the metric of each target's paired differences, and those differences."""
    pairs = () if tuning.tuned is None else tuning.tuned.paired
    shown = {(pair.target, pair.metric) for pair in pairs}
    encoder = tuning.about.get("encoder")
    rows = [row for row in probe.rows if (row.target, row.metric) in shown]
    frozen = [pair for pair in pairs if pair.against == "frozen"]
    titles = [
        f"{pair.target} {pair.metric}, tuned minus "
        + _TUNING_REFERENCES.get(pair.against, "{0}").format(pair.reference)
        for pair in pairs
    ]
    differences = [forest.paired_difference(title, pair) for title, pair in zip(titles, pairs, strict=True)]
    groups = forest.forest(rows, frozen, ours=lambda row: row.name == encoder and row.probe == "tuned")
    return {"groups": groups, "all_rows": probe.rows, "differences": differences}


def segmentation_section(segmentation: Training, probe: ProbeContents) -> tuple[dict[str, object], list[Missing]]:
    """The values of the section, and the parts that cannot be read. Raises OctjepaError: results.json is damaged."""
    about, results, missing = segmentation.about, segmentation.segmented, list[Missing]()
    names = about["classes"]
    try:
        if any(not row.target for row in probe.rows):
            raise KeyError("class")
        head = about["head"]
        rows = [
            replace(row, pool="none", probe="constant" if row.name == "position_prior" else head) for row in probe.rows
        ]
        groups = forest.forest(
            [row for row in rows if row.metric == "dice"], ours=lambda row: row.name == about["encoder"]
        )
        differences = [
            forest.paired_difference(
                "Mean Dice of the head minus " + _SEGMENTATION_REFERENCES.get(pair.reference, pair.reference), pair
            )
            for pair in (() if results is None else results.paired)
        ]
        selected = _selected_weights(None if results is None else results.chosen.get(about["encoder"]))
    except KeyError as error:
        raise OctjepaError(f"results.json is damaged: the key {error} is missing") from None
    bscans = None if results is None else results.bscans
    parts: dict[str, list[Any]] = {"b_scans": [], "sectors": []}
    for key, title, read in (
        ("b_scans", "the B-scans", lambda: _b_scans(segmentation.path / "bscans.npz", bscans)),
        ("sectors", "the ETDRS sectors", lambda: _sectors(segmentation.path / "etdrs.tsv", names)),
    ):
        try:
            parts[key] = read()
        except OctjepaError as error:
            missing.append(Missing(title, str(error), "octjepa segment into a new --out"))
    thickness = segmentation.path / "thickness.svg"
    return {
        **parts,
        "groups": sorted(groups, key=lambda group: group.target != "mean"),  # the mean over classes first
        "all_rows": rows,
        "differences": differences,
        "selected": selected,
        "colours": {name: svg.class_colour(code) for code, name in enumerate(names, start=1)},
        "labelled": {} if results is None else results.labelled,
        "thickness": svg.data_uri(thickness.read_bytes(), "image/svg+xml") if thickness.is_file() else "",
    }, missing


def _selected_weights(choice: ChosenHead | None) -> str:
    if choice is None:
        return ""
    what = f"the weights after update {choice.update}" if choice.penalty is None else f"penalty {choice.penalty:g}"
    dice = forest.finite(choice.val_dice)
    if dice is None:
        return f"{what}, with no class in val to choose by"
    return f"{what}, chosen on validation people (Dice there {dice:.3f})"


def _b_scans(path: Path, entries: Sequence[ShownBScan] | None) -> list[BScan]:
    if entries is None:
        raise OctjepaError("there is no results.json that names B-scans")
    if not entries:
        return []
    from octjepa.read.formats.arrays import check_npz
    from octjepa.tasks.segment.bscans import PARTS

    try:
        check_npz(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return [_b_scan(entry, *(arrays[f"{entry.which}_{part}"] for part in PARTS)) for entry in entries]
    except (OSError, ValueError, KeyError, BadZipFile, NotImplementedError, VolumeRejected) as error:
        raise OctjepaError(f"{path} cannot be read ({type(error).__name__})") from None


def _b_scan(entry: ShownBScan, pixels: np.ndarray, true: np.ndarray, predicted: np.ndarray) -> BScan:
    rule = {
        "typical": f"Typical: the median Dice of {entry.test_scans} test scans",
        "worst": f"Worst: the lowest Dice of {entry.test_scans} test scans",
    }.get(entry.which, "The only test scan that can be evaluated")
    where = f"{entry.device}, {entry.eye or 'eye unknown'}, volume {entry.volume_id}, B-scan {entry.bscan}"
    bars = svg.scale_bars(pixels.shape, entry.spacing_mm, (0.2, 1.0))
    pictures = (
        ("The B-scan", svg.scan(pixels, f"{rule}: {where}", [bars])),
        ("True", svg.scan(pixels, f"True labels: {where}", [svg.class_overlay(true)])),
        ("Predicted by the head", svg.scan(pixels, f"Predicted labels: {where}", [svg.class_overlay(predicted)])),
    )
    sentence = f"{rule}, {entry.dice:.3f}: {where.replace('_', ' ')} of {entry.of}"
    return BScan(sentence, pictures, svg.depth_stretch(pixels.shape, entry.spacing_mm))


def _sectors(path: Path, names: Sequence[str]) -> list[SectorThickness]:
    """Means over the scans in which both the prediction and the truth have the sector."""
    pairs: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in names}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                scans = pairs[plain_cell(row["class"])].setdefault(row["sector"], [])
                if row["predicted_um"] and row["true_um"]:
                    scans.append((float(row["predicted_um"]), float(row["true_um"])))
    except (OSError, ValueError, KeyError) as error:
        raise OctjepaError(f"{path} is damaged ({type(error).__name__})") from None
    thickness = []
    for name, sectors in pairs.items():
        means: dict[str, tuple[float, float, int]] = {}
        for sector, scans in sectors.items():
            predicted, true = np.mean(scans, axis=0).tolist() if scans else (float("nan"), float("nan"))
            means[sector] = predicted, true, len(scans)
        if any(sectors.values()):
            thickness.append(SectorThickness(name, means))
    return thickness
