"""What a segmentation alone puts on the page: who was learnt from, Dice beside what knows less, B-scans, thickness.

Everything is read from the folder that `octjepa segment` left; labels and encoder need not be there any more.
"""

from __future__ import annotations

import base64
import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from markupsafe import Markup

from octjepa.errors import OctjepaError
from octjepa.report.figures import forest, labels, scan
from octjepa.report.gather import Missing, SegmentationContents

MEAN = "mean"  # of the classes, in rows
BESIDE = {
    "untrained": "the same head on the untrained encoder",
    "intensity": "the same head on grey levels alone",
    "place_prior": "the commonest class of each place, which sees no picture",
}


@dataclass(frozen=True)
class BScan:
    """One B-scan three times: as it is, with the true labels, with what the head says; and why this one."""

    sentence: str
    pictures: tuple[tuple[str, Markup], ...]
    stretch: float


@dataclass(frozen=True)
class Sectors:
    """Means of a class in the ETDRS sectors over the test scans that show them: {sector: (said, true, scans)} in um."""

    label: str
    means: dict[str, tuple[float, float, int]]


@dataclass(frozen=True)
class SegmentationPage:
    """The parts of the page; empty where the folder does not hold them."""

    chosen: str
    colours: dict[str, str]
    labelled: Mapping[str, Any]
    bscans: list[BScan]
    sectors: list[Sectors]
    thickness: str


def build(contents: SegmentationContents, lacks: Callable[[Missing], None]) -> SegmentationPage:
    """What cannot be read goes to `lacks`, and the rest stands."""
    found = contents.results
    names = contents.about["classes"]

    def part(name: str, read: Callable[[], list[Any]]) -> list[Any]:
        try:
            return read()
        except OctjepaError as error:
            lacks(Missing(name, str(error), "octjepa segment into a new --out"))
            return []

    return SegmentationPage(
        _chosen(found.get("chosen", {}).get(contents.about["encoder"])),
        {name: labels.colour(code) for code, name in enumerate(names, start=1)},
        found.get("labelled", {}),
        part("the B-scans", lambda: _bscans(contents.path / "bscans.npz", found.get("bscans"))),
        part("the ETDRS sectors", lambda: _sectors(contents.path / "etdrs.tsv", names)),
        _inline(contents.path / "thickness.svg"),
    )


def forest_rows(contents: SegmentationContents, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `octjepa segment` as the page's tables have them: a class is a target, the head a probe."""
    head, encoder = contents.about["head"], contents.about["encoder"]
    return [
        {
            **row, "target": row["class"], "pool": "none", "ours": row["name"] == encoder,
            "probe": "constant" if row["name"] == "place_prior" else head,
        }
        for row in rows
    ]  # fmt: skip


def groups(rows: Sequence[Mapping[str, Any]]) -> list[forest.ForestGroup]:
    """Dice of the mean over classes, then of each class, on one scale."""
    found = forest.forest([row for row in rows if row["metric"] == "dice"])
    return sorted(found, key=lambda group: group.target != MEAN)


def differences(contents: SegmentationContents) -> list[forest.Difference]:
    """Mean Dice of the head minus that of each row that knows less."""
    return [
        forest.difference(f"Mean Dice of the head minus {BESIDE.get(pair['reference'], pair['reference'])}", pair)
        for pair in contents.results.get("paired", ())
    ]


def minus(contents: SegmentationContents, reference: str) -> Mapping[str, Any] | None:
    """The paired difference of mean Dice to `reference`."""
    return next((pair for pair in contents.results.get("paired", ()) if pair["reference"] == reference), None)


def _chosen(made: Mapping[str, Any] | None) -> str:
    if made is None:
        return ""
    what = f"penalty {made['penalty']:g}" if "penalty" in made else f"the weights after update {made['update']}"
    dice = forest.finite(made.get("val_dice"))
    if dice is None:
        return f"{what}, with no class in val to choose by"
    return f"{what}, chosen on validation people (Dice there {dice:.3f})"


def _bscans(path: Path, shown: Sequence[Mapping[str, Any]] | None) -> list[BScan]:
    if shown is None:
        raise OctjepaError("results.json names none: the head was made before they were kept")
    if not shown:
        return []
    from octjepa.tasks.segment.bscans import PARTS

    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return [_bscan(one, *(arrays[f"{one['which']}_{part}"] for part in PARTS)) for one in shown]
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise OctjepaError(f"{path} cannot be read ({type(error).__name__})") from None


def _bscan(one: Mapping[str, Any], pixels: np.ndarray, true: np.ndarray, said: np.ndarray) -> BScan:
    (height, width), (down_mm, across_mm) = pixels.shape, one["spacing_mm"]
    why = {
        "typical": f"Typical: the median Dice of {one['test_scans']} test scans",
        "worst": f"Worst: the lowest Dice of {one['test_scans']} test scans",
    }.get(one["which"], "The only test scan that can be judged")
    where = f"{one['device']}, {one['eye'] or 'eye unknown'}, volume {one['volume_id']}, B-scan {one['bscan']}"
    bars = scan.scale_bars((height, width), (down_mm, across_mm), (0.2, 1.0))
    pictures = (
        ("The B-scan", scan.picture(pixels, f"{why}: {where}", [bars])),
        ("True", labels.labelled(pixels, true, f"True labels: {where}")),
        ("Said by the head", labels.labelled(pixels, said, f"What the head says: {where}")),
    )
    sentence = f"{why}, {one['dice']:.3f}: {where.replace('_', ' ')} of {one['of']}"
    return BScan(sentence, pictures, scan.SHOWN_ASPECT * width * across_mm / (height * down_mm))


def _sectors(path: Path, names: Sequence[str]) -> list[Sectors]:
    """Over the scans in which both the answer and the truth have a mean there."""
    known: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in names}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                pairs = known[row["class"]].setdefault(row["sector"], [])
                if row["said_um"] and row["true_um"]:
                    pairs.append((float(row["said_um"]), float(row["true_um"])))
    except (OSError, ValueError, KeyError) as error:
        raise OctjepaError(f"{path} is damaged ({type(error).__name__})") from None
    return [
        Sectors(name, {sector: (*_means(pairs), len(pairs)) for sector, pairs in of.items()})
        for name, of in known.items()
        if any(of.values())
    ]


def _means(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """NaN of nothing."""
    said, true = np.mean(pairs, axis=0).tolist() if pairs else (float("nan"), float("nan"))
    return said, true


def _inline(path: Path) -> str:
    """A drawing as a data URI; "" where there is none."""
    if not path.is_file():
        return ""
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
