"""`make real`: layers, fluid and thickness on the real development eyes, beside graders, baselines and the device.

`python -m benchmarks.real_eyes [--weights FOLDER] [--shared FOLDER] [--out docs/real]` segments the five Duke eyes and
two HEYEX exports with the packaged network or the one in FOLDER. It writes README.md and a picture of every Duke eye
with its best, median and worst B-scan, and results.json (of docs/real: into benchmarks/records/real). Parts that were
computed with the same weights are taken from build/real, so an interrupted call goes on. Without the shared data it
says so and ends with exit code 0.

These are results on development eyes; the page says what was chosen with them in view. The B-scans of the Duke eyes
are a sparse sample, so each is taken alone. Graders place the edges of the ellipsoid zone and of the RPE according to
a definition of their own; "shifted" subtracts from these two boundaries a constant that is measured on the other eyes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.exam.real_eyes import DEVELOPMENT_EYES

import octjepa
from octjepa.checkpoint.boundary_unet import PACKAGED
from octjepa.files import write_json
from octjepa.layers import BOUNDARIES, BOUNDARY_NAMES
from octjepa.tasks.segmenter.inference import Segmentation, Segmenter, load_segmenter, near_bscans_of
from octjepa.tasks.segmenter.measurement import Preparation, measure
from octjepa.tasks.segmenter.outer_boundaries import outer_boundaries
from octjepa.tasks.segmenter.scan_picture import LINE_COLOURS, draw_scan
from octjepa.tasks.segmenter.validation import dice_at
from octjepa.tasks.thickness import SECTORS
from octjepa.volume import OCTVolume

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
PAGES = ROOT / "docs" / "real"
RECORDS = ROOT / "benchmarks" / "records" / "real"
METHOD = 3  # changes whenever the same weights give other numbers
PICTURED = "01"  # the eye of the picture in README.md and docs/segment.md
USUAL_WAY = "half of the weights"  # what `octjepa segment adapt` does; decision 0011 has the other ways
_ALL_BSCANS = 11
LAYER_ROWS = ("octjepa", "octjepa, shifted", "network alone", "surface finder", "second grader")
BINS = 2048  # of the scores of voxels, over which average precision is pooled
SOURCE = (
    "Duke eyes with diabetic macular oedema: Chiu et al., Biomedical Optics Express 6(4), 2015, published by Duke "
    "University; pictures are made from a copy under CC0."
)
ZONES = {
    "C0": "central",
    "S1": "inner_superior",
    "N1": "inner_nasal",
    "I1": "inner_inferior",
    "T1": "inner_temporal",
    "S2": "outer_superior",
    "N2": "outer_nasal",
    "I2": "outer_inferior",
    "T2": "outer_temporal",
}


def development_eyes(shared: Path) -> Iterator[tuple[str, Path, np.ndarray, np.ndarray, np.ndarray]]:
    """Name, scan, layers of grader 1 and grader 2 `[D, 8, W]`, and fluid `[D, H, W]` of each eye."""
    for name in ("01", "04", "02", "05", "07"):
        first = name in ("01", "04")
        folder = shared / "data" if first else shared / "real" / "duke_dme_more"
        labels = shared / "labels" if first else folder
        layers = np.load(labels / f"duke_dme_eye{name}_layers.npz")
        fluid = np.load(folder / f"duke_dme_eye{name}_fluid.npz")["fluid"] > 0
        yield name, folder / f"duke_dme_eye{name}_11x496x768.dcm", layers["layers"], layers["layers2"], fluid


def weights_code(folder: Path) -> str:
    """A short hash of the network and its calibration."""
    code = hashlib.sha256(str(METHOD).encode())
    for name in ("segmenter.safetensors", "segmenter.json"):
        code.update((folder / name).read_bytes())
    return code.hexdigest()[:12]


def retained(path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The JSON object in `path`, computed and written if there is none."""
    if path.is_file():
        read: dict[str, Any] = json.loads(path.read_text())
        return read
    made = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, made)
    return made


def mean_error_um(rows: np.ndarray, graded: np.ndarray, um: float) -> list[float]:
    """Mean absolute error of each boundary; both arrays are [boundary, slice, column]."""
    return [round(float(np.nanmean(np.abs(a - b))) * um, 2) for a, b in zip(rows, graded, strict=True)]


def duke_eye(
    segmenter: Segmenter, name: str, scan: Path, layers: np.ndarray, second: np.ndarray, fluid: np.ndarray, *, out: Path
) -> dict[str, Any]:
    """Scores of one Duke eye, and its picture in `out`."""
    volume = octjepa.read_volume(scan)
    um = 1000 * volume.spacing_mm[1]
    shown = segmenter.segment(volume)
    network = segmenter.predict(volume.pixels, volume.spacing_mm, None, sparse=True)
    finder = outer_boundaries(volume, near_bscans_of(volume))
    graded = layers.transpose(1, 0, 2)
    error = shown.boundaries_px - graded
    voxels = np.broadcast_to(np.isfinite(layers[:, :1]), fluid.shape)
    marked = (shown.classes == 1) | (shown.classes == 2)
    per_bscan = np.nanmean(np.abs(error), axis=(0, 2)) * um
    if name == PICTURED:
        made = measure(volume, shown, Preparation())
        draw_scan(out / "scan.png", f"Duke eye {name} (Chiu et al. 2015)", volume, shown, made)
    picture(out / f"duke_{name}.jpg", name, volume, shown, layers, fluid, per_bscan)
    return {
        "shown_um": mean_error_um(shown.boundaries_px, graded, um),
        "signed_um": [round(float(np.nanmean(line)) * um, 2) for line in error],
        "network_um": mean_error_um(network.boundaries_px, graded, um),
        "finder_um": mean_error_um(finder, graded[[0, 7]], um),
        "graders_um": mean_error_um(second.transpose(1, 0, 2), graded, um),
        "shifted_um": {
            str(k): {str(shift): round(float(np.nanmean(np.abs(error[k] * um - shift))), 3) for shift in range(-30, 31)}
            for k in (5, 6)
        },
        "bscans_um": per_bscan.round(2).tolist(),
        "dice": round(dice_at(marked[voxels].astype(np.float32), fluid[voxels], 0.5), 4),
        "overlap": [int((marked & fluid)[voxels].sum()), int(marked[voxels].sum()), int(fluid[voxels].sum())],
        "network_scores": score_counts(shown.fluid[voxels].astype(float), fluid[voxels]),
        "intensity_scores": score_counts(darkness(volume, finder)[voxels], fluid[voxels]),
    }


def darkness(volume: OCTVolume, finder: np.ndarray) -> np.ndarray:
    """The baseline for fluid: how dark a voxel is, smoothed, between ILM and Bruch's membrane; 0 elsewhere."""
    from scipy.ndimage import uniform_filter

    row = np.arange(volume.shape[1])[:, None]
    result = np.zeros(volume.shape, np.float32)
    margin = 0.03 / volume.spacing_mm[1]
    for index, bscan in enumerate(volume.pixels):
        ilm, bruch = finder[:, index]
        inside = (row > ilm + margin) & (row < bruch - margin)
        smooth = uniform_filter(bscan.astype(np.float32), size=(9, 3))
        tissue = float(np.median(smooth[inside])) if inside.any() else 1.0
        result[index] = np.where(inside, np.clip(1 - smooth / max(2 * tissue, 1), 0, 1), 0)
    return result


def score_counts(scores: np.ndarray, truth: np.ndarray) -> list[list[int]]:
    """Voxels per bin of score: [without fluid, with fluid]."""
    bins = np.clip((scores * BINS).astype(int), 0, BINS - 1)
    return [np.bincount(bins[truth == value], minlength=BINS).tolist() for value in (False, True)]


def pooled_precision(parts: list[list[list[int]]]) -> tuple[float, float]:
    """(average precision, Dice at the best threshold) of all eyes together, from the counts of `score_counts`."""
    counts = np.sum([np.array(part) for part in parts], axis=0)[:, ::-1]
    false, true = np.cumsum(counts, axis=1)
    recall = true / max(true[-1], 1)
    precision = true / np.maximum(true + false, 1)
    dice = 2 * true / np.maximum(true + false + true[-1], 1)
    return round(float(np.sum(np.diff(recall, prepend=0) * precision)), 4), round(float(dice.max()), 4)


def heyex_eye(segmenter: Segmenter, export: Path) -> dict[str, Any]:
    """Thickness per ETDRS sector of one export: the device's, ours, and that of the network alone, in um."""
    grid = next(ET.parse(export).getroot().iter("ThicknessGrid"))
    device = {
        ZONES[str(zone.findtext("Name"))]: 1000 * float(zone.findtext("AvgThickness") or "nan")
        for zone in grid.iter("Zone")
    }
    volume = octjepa.read_volume(export)
    shown = segmenter.segment(volume)
    network = segmenter.predict(volume.pixels, volume.spacing_mm, volume.slice_positions_mm)
    positions = volume.slice_positions_mm
    assert positions is not None
    # The grid of both exports is at its default place, the middle of the scan.
    middle = (float(abs(positions[-1] - positions[0])) / 2, (volume.shape[2] - 1) * volume.spacing_mm[2] / 2)

    def sectors(found: Segmentation, at: tuple[float, float] | None) -> dict[str, float | None]:
        means = measure(volume, found, Preparation(), at).etdrs_um[0]
        return {name: round(float(v), 1) if np.isfinite(v) else None for name, v in zip(SECTORS, means, strict=True)}

    return {
        "device": {name: round(device[name], 1) for name in SECTORS},
        "shown": sectors(shown, middle),
        "network": sectors(network, middle),
        "about_the_fovea": sectors(shown, None),
    }


def picture(
    path: Path, name: str, volume: OCTVolume, found: Segmentation, layers: np.ndarray, fluid: np.ndarray, um: np.ndarray
) -> None:
    """Writes the best, median and worst B-scan: ours as lines and filled, graders dotted and outlined."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    order = np.argsort(np.where(np.isfinite(um), um, np.inf))[: int(np.isfinite(um).sum())]
    chosen = (("best", order[0]), ("median", order[len(order) // 2]), ("worst", order[-1]))
    dy, dx = volume.spacing_mm[1:]
    figure = Figure(figsize=(13, 4.1), layout="constrained", facecolor="white")
    for panel, (word, index) in zip(figure.subplots(1, 3), chosen, strict=True):
        graded = np.flatnonzero(np.isfinite(layers[index, 0]))
        first, last = int(graded[0]), int(graded[-1]) + 1
        top = max(0, int(np.nanmin(layers[index]) - 0.15 / dy))
        bottom = min(volume.shape[1], int(np.nanmax(layers[index]) + 0.2 / dy))
        extent = (first * dx, last * dx, bottom * dy, top * dy)
        panel.imshow(volume.pixels[index, top:bottom, first:last], cmap="gray", extent=extent, aspect="auto")
        across = (np.arange(volume.shape[2]) + 0.5) * dx
        ours = np.isin(found.classes[index], (1, 2))
        clear = np.ma.masked_equal(ours[top:bottom, first:last], 0)
        panel.imshow(
            clear, cmap="cool", vmin=0, vmax=2, alpha=0.45, extent=extent, aspect="auto", interpolation="nearest"
        )
        down = (np.arange(volume.shape[1]) + 0.5) * dy
        if fluid[index].any():
            panel.contour(across, down, fluid[index], levels=[0.5], colors="white", linewidths=0.7)
        for line, truth, colour in zip(found.boundaries_px[:, index], layers[index], LINE_COLOURS, strict=True):
            panel.plot(across, (line + 0.5) * dy, color=colour, linewidth=1.0)
            panel.plot(across, (truth + 0.5) * dy, color="white", linewidth=0.8, linestyle=":")
        panel.set(xlim=(first * dx, last * dx), ylim=(bottom * dy, top * dy), xlabel="mm")
        panel.set_title(f"{word}: B-scan {index + 1}, {um[index]:.1f} µm", fontsize=10)
        panel.tick_params(labelsize=7)
    handles = [Line2D([], [], color=c, label=n) for n, c in zip(BOUNDARY_NAMES, LINE_COLOURS, strict=True)]
    handles.append(Line2D([], [], color="black", linestyle=":", label="grader (white); outline: fluid by the grader"))
    figure.legend(handles=handles, loc="outside lower center", ncols=9, fontsize=8, frameon=False)
    figure.suptitle(f"Duke eye {name}: octjepa (lines, filled) and grader (dotted, outlined)", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, pil_kwargs={"quality": 82})


def tasks(duke: dict[str, dict[str, Any]], heyex: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The results of layers, fluid and thickness from the parts of every eye."""
    eyes = list(duke.values())

    def mean(key: str) -> list[float]:
        return [round(float(value), 2) for value in np.mean([eye[key] for eye in eyes], axis=0)]

    shifted = np.array([eye["shown_um"] for eye in eyes])
    signed = np.array([eye["signed_um"] for eye in eyes])
    for k, eye in enumerate(eyes):
        for boundary in (5, 6):
            shift = int(np.clip(round(float(np.delete(signed[:, boundary], k).mean())), -30, 30))
            shifted[k, boundary] = eye["shifted_um"][str(boundary)][str(shift)]
    both, marked, truth = np.sum([eye["overlap"] for eye in eyes], axis=0)
    precision, best = pooled_precision([eye["network_scores"] for eye in eyes])
    dark_precision, dark_best = pooled_precision([eye["intensity_scores"] for eye in eyes])
    sectors = {
        kind: [
            abs(eye[kind][s] - eye["device"][s]) for eye in heyex.values() for s in SECTORS if eye[kind][s] is not None
        ]
        for kind in ("shown", "network", "about_the_fovea")
    }
    return {
        "task_1_um": {
            "octjepa": mean("shown_um"),
            "octjepa, shifted": [round(float(v), 2) for v in shifted.mean(0)],
            "network alone": mean("network_um"),
            "surface finder": [mean("finder_um")[0], *[None] * 6, mean("finder_um")[1]],
            "second grader": mean("graders_um"),
        },
        "task_2": {
            "octjepa": {
                "dice": round(2 * both / (marked + truth), 4),
                "average_precision": precision,
                "best_dice": best,
                "volume_ratio": round(marked / truth, 3),
            },
            "darkness between ILM and BM": {"average_precision": dark_precision, "best_dice": dark_best},
        },
        "task_4_um": {
            kind: {"mean": round(float(np.mean(v)), 2), "largest": round(float(np.max(v)), 2), "sectors": len(v)}
            for kind, v in sectors.items()
            if v
        },
    }


def page(results: dict[str, Any]) -> str:
    """README.md: the tables of `results`."""
    found, duke, heyex = results["tasks"], results["duke"], results["heyex"]
    lines = [
        "# Real eyes",
        "",
        "This page compares `octjepa segment` with graders and with the device on real eyes. `make real` writes this",
        "page.",
        "",
        "The network was trained on synthetic eyes. The real eyes were used during development, so this is not an",
        "independent test. Three decisions used them. After pictures and errors of the network in these eyes had been",
        "seen, the training phantoms got turbid fluid, and later thicker and brighter nerve fibres (RNFL/GCL error",
        "15.1 um before the second change, 9.1 um after; the table is from a later measurement). The ILM and Bruch's",
        "membrane come from the surface finder, which is closer to the graders. In one HEYEX eye with drusen it was",
        "39 um wrong in a sector, so Bruch's membrane comes from the network if the finder is over 25 um above it;",
        "limits of 12 to 40 um gave nearly the same (`octjepa.tasks.segmenter.outer_boundaries`).",
        f"Weights: `{results['weights']}`.",
        "",
        "![B-scans of a real eye with boundaries and fluid by octjepa and by a grader](duke_04.jpg)",
        "",
        "## Layers",
        "",
        "Mean absolute error in um against the first grader, graded columns, mean over five eyes with macular oedema.",
        '"Shifted" subtracts from IS/EZ and OS/RPE a constant that is measured on the other four eyes, because graders',
        "place these edges by another definition.",
        "",
        "| | " + " | ".join(BOUNDARY_NAMES) + " | mean |",
        "|---" * (len(BOUNDARIES) + 2) + "|",
    ]
    for name in (row for row in LAYER_ROWS if row in found["task_1_um"]):
        values = found["task_1_um"][name]
        known = [value for value in values if value is not None]
        mean = f"{np.mean(known):.1f}" if len(known) == len(values) else ""
        cells = ["" if value is None else f"{value:.1f}" for value in values]
        lines.append(f"| {name} | {' | '.join(cells)} | {mean} |")
    lines += [
        "",
        "## Fluid",
        "",
        "Voxels of the five eyes together, graded columns. Two graders reached a Dice of about 0.58 on this data set",
        "(Chiu et al. 2015, cited from memory). The baseline is the darkness of a voxel between ILM and Bruch's",
        "membrane; its threshold is the best on these eyes, which favours it.",
        "",
        "| | Dice | average precision | marked / graded volume |",
        "|---|---|---|---|",
    ]
    ours, dark = found["task_2"]["octjepa"], found["task_2"]["darkness between ILM and BM"]
    lines += [
        f"| octjepa, at the threshold chosen on synthetic eyes | {ours['dice']:.2f} "
        f"| {ours['average_precision']:.2f} | {ours['volume_ratio']:.2f} |",
        f"| octjepa, at the best threshold | {ours['best_dice']:.2f} | | |",
        f"| darkness between ILM and BM | {dark['best_dice']:.2f} | {dark['average_precision']:.2f} | |",
        "",
        "## Every eye",
        "",
        "| eye | mean of eight boundaries, um | fluid Dice | best, median, worst B-scan |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| Duke {name} | {np.mean(eye['shown_um']):.1f} | {eye['dice']:.2f} | [picture](duke_{name}.jpg) |"
        for name, eye in ((name, duke[name]) for name in DEVELOPMENT_EYES if name in duke)
    ]
    if heyex:
        words = {
            "shown": "octjepa",
            "network": "network alone",
            "about_the_fovea": "octjepa, grid about the fovea that it finds",
        }
        lines += [
            "",
            "## Thickness against the device",
            "",
            "Mean thickness in ETDRS sectors of two HEYEX exports (Heidelberg Spectralis, one eye with drusen, one",
            "healthy): difference in um from the grid that the device wrote into the export. The grid is in the middle",
            "of the scan. The rule for Bruch's membrane was made after errors in these two eyes had been seen. The",
            "second row does not use it.",
            "",
            "| | mean difference | largest | sectors |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {words[kind]} | {value['mean']:.1f} | {value['largest']:.1f} | {value['sectors']} |"
            for kind, value in ((kind, found["task_4_um"][kind]) for kind in words if kind in found["task_4_um"])
        ]
    return "\n".join([*lines, *_adaptation(results), "", SOURCE, ""])


def _adaptation(results: dict[str, Any]) -> list[str]:
    """The section about adaptation to one labelled eye; nothing if it was not measured."""
    rows = results.get("adaptation") or []
    if not rows:
        return []
    packaged, fluid = np.mean(results["tasks"]["task_1_um"]["octjepa"]), results["tasks"]["task_2"]["octjepa"]
    usual = [row for row in rows if row["way"] == (USUAL_WAY if row["start"] == "packaged" else "all weights")]
    others = [row for row in rows if row["start"] == "packaged" and row["bscans"] == _ALL_BSCANS]
    return [
        "",
        "## After one labelled eye",
        "",
        "`octjepa segment adapt` learns the labels of one Duke eye; the four others are scored. Means over the five",
        "eyes, each learned from in turn (`python -m benchmarks.adapt_real_eyes`). One seed. Every row makes at most",
        "110 steps. That is not enough to converge from random weights: the rows compare two starts in this time, and",
        "do not show how far training from random weights can get. The table is from before the corrections of",
        "2026-11-29, which changed the packaged network by less than 0.1 um in the mean.",
        "",
        "| labelled B-scans | start | mean of eight boundaries, um | fluid Dice | average precision | CPU-seconds |",
        "|---|---|---|---|---|---|",
        f"| none | packaged | {packaged:.1f} | {fluid['dice']:.2f} | {fluid['average_precision']:.2f} | |",
        *(f"| {row['bscans']} | {row['start']} | {_scores(row)} |" for row in usual),
        "",
        "The result is the mean of the learned weights and those of the packaged network. This way was chosen on",
        "phantom scanners ([decision 0011](../decisions/0011-training-of-the-segmentation-network.md)).",
        "Both ways, learned from eleven B-scans:",
        "",
        "| way | mean of eight boundaries, um | fluid Dice | average precision | CPU-seconds |",
        "|---|---|---|---|---|",
        *(f"| {row['way']} | {_scores(row)} |" for row in others),
    ]


def _scores(row: dict[str, Any]) -> str:
    return f"{row['um']:.1f} | {row['dice']:.2f} | {row['ap']:.2f} | {row['cpu_seconds']:.0f}"


def records_of(pages: Path) -> Path:
    """The folder of the JSON results of a folder of pages: itself, and benchmarks/records/real for docs/real."""
    return RECORDS if pages.resolve() == PAGES else pages


def main() -> int:
    """Writes the results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=PACKAGED, help="folder of segmenter.safetensors and .json")
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder of the real eyes")
    parser.add_argument("--out", type=Path, default=PAGES, help="page, pictures and results.json")
    parser.add_argument("--parts", type=Path, default=ROOT / "build" / "real", help="folder of finished parts")
    options = parser.parse_args()
    if not (options.shared / "labels").is_dir() or not (options.shared / "real").is_dir():
        print(f"there are no real eyes in {options.shared}: nothing to do (--shared names another folder)")
        return 0
    code = weights_code(options.weights)
    parts = options.parts / code
    segmenter = load_segmenter(options.weights)
    duke: dict[str, dict[str, Any]] = {}
    for name, scan, layers, second, fluid in development_eyes(options.shared):
        compute = partial(duke_eye, segmenter, name, scan, layers, second, fluid, out=parts)
        duke[name] = retained(parts / f"duke_{name}.json", compute)
        print(f"Duke {name}: {np.mean(duke[name]['shown_um']):.1f} um, fluid Dice {duke[name]['dice']:.2f}", flush=True)
    heyex: dict[str, dict[str, Any]] = {}
    for export in sorted((options.shared / "real" / "heyex_exports").glob("*/*.xml")):
        name = export.parent.name
        heyex[name] = retained(parts / f"heyex_{name}.json", partial(heyex_eye, segmenter, export))
        print(f"HEYEX {name}: done", flush=True)
    results = {"weights": code, "tasks": tasks(duke, heyex), "duke": {}, "heyex": heyex, "source": SOURCE}
    short = ("shown_um", "signed_um", "network_um", "finder_um", "graders_um", "bscans_um", "dice")
    records = records_of(options.out)
    adaptation = records / "adaptation.json"
    if adaptation.is_file():
        results["adaptation"] = json.loads(adaptation.read_text())["rows"]
    results["duke"] = {name: {key: eye[key] for key in short} for name, eye in duke.items()}
    write_json(records / "results.json", results)
    (options.out / "README.md").write_text(page(results), encoding="utf-8")
    for drawn in (*parts.glob("duke_*.jpg"), *parts.glob("scan.png")):
        shutil.copyfile(drawn, options.out / drawn.name)
    print(json.dumps(results["tasks"], indent=1))
    print(f"written: {options.out / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
