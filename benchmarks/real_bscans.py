"""Lesions in single real B-scans and the diagnosis of an eye, with groups of patients held out.

`python -m benchmarks.real_bscans [NAME=ENCODER ...] [--out docs/real]` reads ../shared/real/macular_edema_bscans
and writes bscans.md, and bscans.json (of docs/real: into benchmarks/records/real). These are development eyes; nothing
is chosen with these numbers.

The B-scans come without a spacing and without an order in space. Each is prepared as `octjepa ingest --images` prepares
a picture: 2 mm deep, 6 mm wide, and one position of the token grid along the slice axis. Every row describes the same
tokens. The square that the device painted into every B-scan is replaced by a mirror image of what lies beside it.
B-scans that ingest would refuse are left out and counted.

Lesions: a token is positive where a lesion fills at least 2 % of it, in B-scans that were graded for this lesion. A
logistic regression on 128 principal components of the features, with the token's position, learns from four of five
folds of patient groups. Its threshold for Dice is the best one on the learned folds.
Diagnoses: mean and maximum over the tokens of an eye, 32 principal components, logistic regression for each diagnosis.
`biomarkers` are thickness of layers and shares of fluid by the segmentation network, as `octjepa embed biomarkers`.

Each interval (95 %) resamples patient groups and is Student's (`octjepa.metrics.intervals`), because there are few
groups. It counts the groups that have the finding, or those without it if they are fewer. Differences resample the same
groups for both rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from benchmarks.exam.measured import MEAN
from benchmarks.exam.readings import STRENGTHS, Projection, interleave, logistic_scores
from benchmarks.exam.tokens import (
    Featurise,
    of_context,
    of_encoder,
    of_intensity,
    of_position,
    patches_of,
    positions_in_view,
)
from benchmarks.exam.truth import view_voxels
from benchmarks.real_eyes import SHARED, records_of
from benchmarks.segmenter_features import recorded_features
from jaxtyping import Bool, Float
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.model_selection import GroupKFold

from octjepa.canonical.native_mapping import NativeMap
from octjepa.canonical.single_bscan import bscan_range, canonicalise_bscan
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.locate import open_encoder
from octjepa.errors import UsageError
from octjepa.files import write_json
from octjepa.metrics.intervals import Scale, student_interval
from octjepa.progress import bar
from octjepa.read.single_bscan import ASSUMED_MM, SLICE_MM
from octjepa.reasons import VolumeRejected
from octjepa.tasks.segmenter.inference import Segmentation, Segmenter, load_segmenter, with_calibration
from octjepa.volume import CanonicalVolume, OCTVolume

LESIONS: Final = ("cyst", "drusen", "fluid", "foci")  # by bit of the masks
DIAGNOSES: Final = ("AMD", "DME", "RVO", "control")
LEAST_SHARE: Final = 0.02  # of a token
BASELINES: Final = ("random_init", "intensity", "context", "position")
OWN_RANDOM: Final = {  # the same network with random weights; random_init: phantom-tiny
    "phantom-unet": "random_unet",
    "phantom-unet and phantom-truth": "random_unet and random_init",
}
ROWS: Final = (  # in this order on the page; rows of other encoders come last
    *(
        "phantom-unet",
        "phantom-truth",
        "phantom-tiny",
        "random_unet",
        "random_init",
        "intensity",
        "context",
        "position",
    ),
    *("segmenter", "random_segmenter", "biomarkers"),
)
SEGMENTED: Final = ("segmenter", "random_segmenter", "biomarkers")  # rows of the network on native B-scans
FOLDS: Final = 5
RESAMPLES: Final = 300
_BURNED_IN: Final = (slice(317, 408), slice(16, 104))  # a square with letters, which could tell the eye


@dataclass(frozen=True)
class Eye:
    """An eye at a visit, its group of patients and its diagnoses."""

    name: str
    group: int
    diagnoses: frozenset[str]


@dataclass(frozen=True, eq=False)
class Frame:
    """A B-scan, its masks and its place in the encoder's view."""

    eye: Eye
    pixels: np.ndarray  # [H, W]
    masks: Bool[np.ndarray, "4 H W"]
    graded: tuple[bool, ...]
    volume: CanonicalVolume
    at: np.ndarray  # native voxel of each position of the view
    inside: np.ndarray

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """The assumed spacing."""
        height, width = self.pixels.shape
        return SLICE_MM, ASSUMED_MM[0] / height, ASSUMED_MM[1] / width


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of all frames in a row, one after the other."""

    features: Float[np.ndarray, "tokens f"]
    index: np.ndarray  # in the raster order of one slice of the grid
    frame: np.ndarray


# --- frames


def read_frames(folder: Path, encoder: PretrainedEncoder) -> tuple[list[Frame], dict[str, int]]:
    """The B-scans of the data set, and how many were refused, by reason."""
    frames: list[Frame] = []
    refused: Counter[str] = Counter()
    paths = sorted(folder.glob("*.npz"))
    with bar("prepare real B-scans", len(paths), "eyes") as progress:
        for path in paths:
            with np.load(path) as data:
                pixels, bits, graded = (data[name] for name in ("volume", "mask_bits", "mask_graded"))
                eye = Eye(
                    path.stem,
                    int(data["patient_group"]),
                    frozenset(str(data["eye_diagnosis"]).replace("|", "+").split("+")),
                )
            for image, mask, grades in zip(pixels, bits, graded, strict=True):
                try:
                    frames.append(_frame(eye, image, mask, int(grades), encoder))
                except VolumeRejected as error:
                    refused[error.reason] += 1
            progress.advance()
    return frames, dict(refused)


def _frame(eye: Eye, image: np.ndarray, bits: np.ndarray, grades: int, encoder: PretrainedEncoder) -> Frame:
    """Raises VolumeRejected: ingest would refuse the B-scan."""
    pixels = image.copy()
    rows, columns = _BURNED_IN
    pixels[_BURNED_IN] = image[rows, columns.stop : 2 * columns.stop - columns.start][:, ::-1]
    preprocessing, slices = encoder.preprocessing, encoder.recipe.tokens.patch_size[0]
    spacing = (SLICE_MM, ASSUMED_MM[0] / image.shape[0], ASSUMED_MM[1] / image.shape[1])
    scan = OCTVolume(pixels[None], spacing, {"slice": "option"}, "", "", pattern="line")
    volume = canonicalise_bscan(scan, preprocessing, slices).volume
    assert volume.frame_shifts is not None
    assert volume.frame_mm is not None
    # The B-scan fills one position of the token grid, whatever lies between B-scans.
    filled_mm = (slices * preprocessing.target_spacing_mm[0], *spacing[1:])
    native = NativeMap(scan.shape, filled_mm, preprocessing, volume.frame_shifts, volume.frame_mm, mirrored=False)
    at, inside = view_voxels(native, preprocessing, 1)
    filled = bscan_range(preprocessing, slices).start - preprocessing.margin[0]
    masks = np.stack([(bits >> bit & 1).astype(bool) for bit in range(len(LESIONS))])
    is_graded = tuple(bool(grades >> bit & 1) for bit in range(len(LESIONS)))
    return Frame(eye, pixels, masks, is_graded, volume, at[filled], inside[filled])


def tiles(frame: Frame, native: np.ndarray, encoder: PretrainedEncoder) -> Float[np.ndarray, "tokens voxels"]:
    """A native map `[H, W]` on the view, cut into the tokens of one slice."""
    values = np.where(frame.inside, native[frame.at[..., 1], frame.at[..., 2]], 0)
    grid, patch = encoder.recipe.grid, encoder.recipe.tokens.patch_size
    return patches_of(values[None], (1, *grid[1:]), (1, *patch[1:]))


# --- rows


def tokens_of(featurise: Featurise, frames: Sequence[Frame], what: str) -> Tokens:
    """Tokens of every frame."""
    features, index, frame_of = [], [], []
    with bar(what, len(frames), "B-scans") as progress:
        for start in range(0, len(frames), 8):
            part = frames[start : start + 8]
            for number, tokens in enumerate(featurise([frame.volume for frame in part])):
                _, height, width = tokens.grid
                features.append(tokens.features.astype(np.float32))
                index.append(tokens.grid_index % (height * width))
                frame_of.append(np.full(len(tokens.grid_index), start + number))
                progress.advance()
    return Tokens(np.concatenate(features), np.concatenate(index), np.concatenate(frame_of))


def retained_rows(folder: Path | None, names: Sequence[str], make: Callable[[], Sequence[Tokens]]) -> dict[str, Tokens]:
    """Rows as `folder` has them, or else made, and kept there for the next time."""
    files = [] if folder is None else [folder / f"{name}.npz" for name in names]
    if files and all(file.is_file() for file in files):
        return {name: _load(file) for name, file in zip(names, files, strict=True)}
    rows = dict(zip(names, make(), strict=True))
    for file, tokens in zip(files, rows.values(), strict=False):
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, features=tokens.features, index=tokens.index, frame=tokens.frame)
    return rows


def _load(file: Path) -> Tokens:
    with np.load(file) as arrays:
        return Tokens(arrays["features"], arrays["index"], arrays["frame"])


def segmented(
    segmenter: Segmenter, frames: Sequence[Frame], like: Tokens, encoder: PretrainedEncoder
) -> tuple[Tokens, Tokens]:
    """Tokens and biomarkers of every frame by the segmentation network; of biomarkers a frame has one "token".

    Tokens: mean and maximum, over each token, of the last features and of the probability of fluid. Biomarkers: mean
    and spread of the thickness of seven layers, and shares of the classes in the retina.
    """
    features, markers = [], []
    with bar("segmentation network", len(frames), "B-scans") as progress:
        for number, frame in enumerate(frames):
            with recorded_features(segmenter) as outputs:
                result = segmenter.predict(frame.pixels[None], frame.spacing_mm, sparse=True)
            last = torch.cat(outputs).numpy()[0]  # [32, h, w]
            height, width = frame.pixels.shape
            rows = np.minimum(np.arange(height) * last.shape[1] // height, last.shape[1] - 1)
            columns = np.minimum(np.arange(width) * last.shape[2] // width, last.shape[2] - 1)
            maps = [channel[rows][:, columns] for channel in last] + [result.fluid[0].astype(np.float32)]
            cut = [tiles(frame, one, encoder)[like.index[like.frame == number]] for one in maps]
            features.append(np.stack([value for one in cut for value in (one.mean(axis=1), one.max(axis=1))], axis=1))
            markers.append(_biomarkers(result))
            progress.advance()
    every = np.arange(len(frames))
    return Tokens(np.concatenate(features), like.index, like.frame), Tokens(np.stack(markers), 0 * every, every)


def _biomarkers(result: Segmentation) -> Float[np.ndarray, " f"]:
    thickness = np.diff(result.boundaries_um[:, 0], axis=0)
    retina = max(float((result.boundaries_px[-1, 0] - result.boundaries_px[0, 0]).sum()), 1.0)
    shares = [np.count_nonzero(result.classes[0] == kind) / retina for kind in range(1, len(result.class_names))]
    return np.array([*thickness.mean(axis=1), *thickness.std(axis=1), *shares], np.float32)


# --- lesions


def lesion_truth(frames: Sequence[Frame], tokens: Tokens, encoder: PretrainedEncoder) -> np.ndarray:
    """Whether each lesion fills at least `LEAST_SHARE` of a token: 1, 0, or -1 where nobody looked, `[4, tokens]`."""
    truth = np.full((len(LESIONS), len(tokens.index)), -1, np.int8)
    for number, frame in enumerate(frames):
        mine = np.flatnonzero(tokens.frame == number)
        for lesion, known in enumerate(frame.graded):
            if known:
                share = tiles(frame, frame.masks[lesion].astype(np.float32), encoder).mean(axis=1)
                truth[lesion, mine] = share[tokens.index[mine]] >= LEAST_SHARE
    return truth


def held_out_scores(
    features: np.ndarray, truth: Bool[np.ndarray, " n"], groups: np.ndarray, components: int, limited: bool = False
) -> tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """(log-odds of every sample from folds without its group, whether it is above the best threshold for Dice).

    limited: features keep the range that they have in the learned folds.
    """
    scores, marked = np.zeros(len(truth)), np.zeros(len(truth), bool)
    for train, test in GroupKFold(FOLDS).split(features, truth, groups):
        project = Projection(features[train], components, limited)
        x = project(features[train])
        scores[test] = logistic_scores(x, truth[train], project(features[test]), STRENGTHS[2])
        marked[test] = scores[test] >= best_threshold(logistic_scores(x, truth[train], x, STRENGTHS[2]), truth[train])
    return scores, marked


def best_threshold(scores: Float[np.ndarray, " n"], truth: Bool[np.ndarray, " n"]) -> float:
    """The threshold with the best Dice."""
    order = np.argsort(-scores)
    hits = np.cumsum(truth[order])
    dice = 2 * hits / (np.arange(1, len(scores) + 1) + truth.sum())
    return float(scores[order[int(np.argmax(dice))]])


def dice(marked: Bool[np.ndarray, " n"], truth: Bool[np.ndarray, " n"]) -> float:
    """Dice of two sets."""
    return float(2 * (marked & truth).sum() / max(marked.sum() + truth.sum(), 1))


def resampled_groups(groups: np.ndarray, among: np.ndarray | None = None) -> list[np.ndarray]:
    """Indices of the samples of groups drawn with replacement, `RESAMPLES` times.

    among: draw from these groups, so that sets of samples with other groups have the same draws; a draw may have no
    sample.
    """
    rng = np.random.default_rng(0)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups if among is None else among)]
    return [
        np.concatenate([members[k] for k in rng.integers(len(members), size=len(members))]) for _ in range(RESAMPLES)
    ]


def interval(whole: float, resamples: Float[np.ndarray, " n"], groups: int, scale: Scale) -> dict[str, float | None]:
    """`whole` with Student's interval from resamples of the `groups`; no ends where all resamples are equal."""
    found = student_interval(whole, resamples, groups, scale)
    ends = {"low": found.low, "high": found.high}
    return {"value": round(whole, 3), **{end: None if at is None else round(at, 3) for end, at in ends.items()}}


Outcome = tuple[np.ndarray, np.ndarray]  # scores of all samples, and which are marked


def baselines_of(row: str) -> tuple[str, ...]:
    """The rows that `row` is compared with."""
    own = OWN_RANDOM.get(row)
    return () if row in BASELINES else BASELINES if own is None else (*BASELINES, own)


@dataclass(frozen=True, eq=False)
class Resampled:
    """Metric and Dice of a row: on everything, and on every resample of the groups."""

    whole: Float[np.ndarray, " 2"]
    drawn: Float[np.ndarray, "resamples 2"]


def resample(
    outcomes: Mapping[str, Outcome], truth: np.ndarray, draws: Sequence[np.ndarray], kind: str
) -> dict[str, Resampled]:
    """Metric and Dice of each row, on everything and on each of the `draws`; not a number without both answers."""
    metric = average_precision_score if kind == "ap" else roc_auc_score

    def measured(name: str, at: np.ndarray) -> tuple[float, float]:
        if not len(at) or truth[at].all() or not truth[at].any():
            return np.nan, np.nan
        scores, marked = outcomes[name]
        return float(metric(truth[at], scores[at])), dice(marked[at], truth[at])

    everything = np.arange(len(truth))
    return {
        name: Resampled(np.array(measured(name, everything)), np.array([measured(name, at) for at in draws]))
        for name in outcomes
    }


def compare(rows: Mapping[str, Resampled], groups: int, kind: str) -> dict[str, Any]:
    """Each row's metric, its Dice, and its difference from each baseline."""
    out: dict[str, Any] = {}
    for name, row in rows.items():
        entry = {kind: interval(row.whole[0], row.drawn[:, 0], groups, "share")}
        if kind == "ap":
            entry["dice"] = interval(row.whole[1], row.drawn[:, 1], groups, "share")
        for baseline in baselines_of(name):
            if baseline in rows:
                less = rows[baseline]
                difference = row.whole[0] - less.whole[0], row.drawn[:, 0] - less.drawn[:, 0]
                entry[f"less_{baseline}"] = interval(*difference, groups, "difference")
        out[name] = entry
    return out


def mean_of(parts: Sequence[Mapping[str, Resampled]]) -> dict[str, Resampled]:
    """The mean over lesions or diagnoses of each row, in the same resamples."""
    return {
        name: Resampled(
            np.mean([part[name].whole for part in parts], axis=0), np.mean([part[name].drawn for part in parts], axis=0)
        )
        for name in parts[0]
    }


def lesions(
    rows: Mapping[str, Tokens], frames: Sequence[Frame], encoder: PretrainedEncoder, limited: bool = False
) -> dict[str, Any]:
    """Lesions: results of every lesion and row."""
    any_row = next(iter(rows.values()))
    truth = lesion_truth(frames, any_row, encoder)
    groups = np.array([frame.eye.group for frame in frames])[any_row.frame]
    position = positions_in_view(any_row.index, (1, *encoder.recipe.grid[1:]))
    out: dict[str, Any] = {}
    in_same_draws = []
    for lesion, name in enumerate(LESIONS):
        known = truth[lesion] >= 0
        positive = truth[lesion][known] == 1
        outcomes = {
            row: held_out_scores(
                interleave([tokens.features[known], position[known]]), positive, groups[known], 128, limited
            )
            for row, tokens in rows.items()
        }
        count = counted_groups(positive, groups[known])
        out[name] = {
            "tokens": int(known.sum()),
            "positive": int(positive.sum()),
            "b_scans": len(np.unique(any_row.frame[known])),
            "groups": len(np.unique(groups[known])),
            "counted_groups": count,
            "rows": compare(resample(outcomes, positive, resampled_groups(groups[known]), "ap"), count, "ap"),
        }
        in_same_draws.append(resample(outcomes, positive, resampled_groups(groups[known], among=groups), "ap"))
        print(name, json.dumps(out[name]), file=sys.stderr)
    return out | {MEAN: mean_entry(out, in_same_draws, "ap")}


def counted_groups(truth: Bool[np.ndarray, " n"], groups: np.ndarray) -> int:
    """Groups with the finding, or groups without it in some sample if these are fewer: they limit what is known."""
    return min(len(np.unique(groups[truth])), len(np.unique(groups[~truth])))


def mean_entry(parts: Mapping[str, Any], rows: Sequence[Mapping[str, Resampled]], kind: str) -> dict[str, Any]:
    """The mean over lesions or diagnoses. It counts as many groups as the one of `parts` with the fewest."""
    count = min(part["counted_groups"] for part in parts.values())
    return {"counted_groups": count, "rows": compare(mean_of(rows), count, kind)}


# --- diagnoses


def diagnoses(eyes: Mapping[str, np.ndarray], frames: Sequence[Frame], limited: bool = False) -> dict[str, Any]:
    """Diagnoses: results of every diagnosis and row. `eyes` holds one vector per eye, in the order of their names."""
    of_eye = {frame.eye.name: frame.eye for frame in frames}
    names = sorted(of_eye)
    known = np.array([bool(of_eye[name].diagnoses & set(DIAGNOSES)) for name in names])
    groups = np.array([of_eye[name].group for name in names])[known]
    draws = resampled_groups(groups)
    out: dict[str, Any] = {}
    in_same_draws = []
    for diagnosis in DIAGNOSES:
        truth = np.array([diagnosis in of_eye[name].diagnoses for name in names])[known]
        outcomes = {row: held_out_scores(values[known], truth, groups, 32, limited) for row, values in eyes.items()}
        in_same_draws.append(resample(outcomes, truth, draws, "auroc"))
        out[diagnosis] = {
            "eyes": int(known.sum()),
            "positive": int(truth.sum()),
            "groups": len(np.unique(groups)),
            "groups_with_it": len(np.unique(groups[truth])),
            "counted_groups": (count := counted_groups(truth, groups)),
            "rows": compare(in_same_draws[-1], count, "auroc"),
        }
        print(diagnosis, json.dumps(out[diagnosis]), file=sys.stderr)
    return out | {MEAN: mean_entry(out, in_same_draws, "auroc")}


def pooled(values: np.ndarray, sample_eye: Sequence[str]) -> Float[np.ndarray, "eyes f"]:
    """Mean and maximum over the samples of each eye, eyes by name."""
    eye_of = np.array(sample_eye)
    parts = [values[eye_of == name] for name in sorted(set(sample_eye))]
    return np.stack([np.concatenate([part.mean(axis=0), part.max(axis=0)]) for part in parts])


# --- the page


def page(results: Mapping[str, Any]) -> str:
    """The results as a page of tables."""

    def cell(entry: Mapping[str, float | None]) -> str:
        if entry["low"] is None:
            return f"{entry['value']:.2f}"
        return f"{entry['value']:.2f} ({entry['low']:.2f} to {entry['high']:.2f})"

    lines = [
        "# Real B-scans without a spacing",
        "",
        "This page measures how well frozen features predict lesions and diagnoses in single real B-scans.",
        "`python -m benchmarks.real_bscans --out docs/real` writes this page.",
        f"{results['frames']} B-scans of {results['eyes']} eye-visits in {results['groups']} groups of patients:",
        "AMD, DME, RVO, and frames without disease of the same clinic.",
        "Groups are held out. Intervals (95 %) resample the groups with graded B-scans. They are Student's, and count",
        "the groups that have the finding, or those without it if they are fewer. A mean uses the smallest number of",
        "groups among its columns.",
        "No interval is given for four groups; an interval from six groups is a rough guide. Left out, because ingest",
        "refuses them:",
        f"{', '.join(f'{count} {reason}' for reason, count in results['refused'].items()) or 'none'}.",
        "These are development eyes. Nothing was chosen with them.",
        "",
        "`phantom-unet`, `phantom-truth` and `phantom-tiny` are the packaged encoders. `phantom-unet` is the",
        "segmentation network on the volumes of the store; `segmenter` is its last features on the native B-scans,",
        "`biomarkers` are the thickness of layers and the shares of classes, such as fluid, from that network.",
        "`random_unet` is `phantom-unet` with random weights; `random_segmenter` and `random_init` (of `phantom-tiny`)",
        "also have random weights. `context` and `intensity` are hand-made features, `position` is the position of a",
        "token.",
        "",
    ]
    sections = (
        ("Lesions by token", "lesions", "ap", "Average precision; a token is positive from 2 % of its area."),
        ("Diagnosis of an eye", "diagnoses", "auroc", "AUROC, each diagnosis against the others."),
    )
    for title, key, metric, what in sections:
        found = results[key]
        lines += [f"## {title}", "", what, "", f"| | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
        for words, count in (("B-scans", "b_scans"), ("eyes", "eyes"), ("groups counted", "counted_groups")):
            if any(count in entry for entry in found.values()):
                lines.append(f"| {words} | {' | '.join(str(entry.get(count, '')) for entry in found.values())} |")
        measured = next(iter(found.values()))["rows"]
        rows = sorted(measured, key=lambda row: ROWS.index(row) if row in ROWS else len(ROWS))
        lines += [
            f"| {row} | {' | '.join(cell(entry['rows'][row][metric]) for entry in found.values())} |" for row in rows
        ]
        lines += ["", "Difference from a baseline, in the same groups:", ""]
        lines += [f"| | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
        for row in rows:
            for baseline in baselines_of(row):
                if all(f"less_{baseline}" in entry["rows"][row] for entry in found.values()):
                    cells = [cell(entry["rows"][row][f"less_{baseline}"]) for entry in found.values()]
                    lines.append(f"| {row} less {baseline} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def merged(results: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """`results` with the rows that only `before` has. Raises UsageError if they are of other B-scans."""
    for key in ("frames", "eyes", "groups", "refused"):
        if results[key] != before[key]:
            raise UsageError(f"bscans.json has {key} {before[key]}, these are {results[key]}: measure all rows")
    for part in ("lesions", "diagnoses"):
        for name, entry in results[part].items():
            rows = before[part].get(name, {"rows": {}})["rows"]
            measured = {row: {**rows.get(row, {}), **values} for row, values in entry["rows"].items()}
            entry["rows"] = {**rows, **measured}
    return results


def measure_rows(
    names: Sequence[str] | None,
    more: Mapping[str, str],
    frames: Sequence[Frame],
    packaged: PretrainedEncoder,
    keep: Path | None,
) -> dict[str, Tokens]:
    """The rows with these `names` (None: every row), and `more`: names and encoders. `keep`: as in `retained_rows`."""
    unet = open_encoder("phantom-unet", packaged.preprocessing)
    makers: dict[str, Callable[[], Featurise]] = {
        "phantom-unet": partial(of_encoder, unet),
        "random_unet": partial(of_encoder, unet.untrained()),
        "phantom-truth": partial(of_encoder, load_encoder("phantom-truth")),
        "phantom-tiny": partial(of_encoder, packaged),
        "random_init": partial(of_encoder, packaged.untrained()),
        "intensity": partial(of_intensity, packaged),
        "context": partial(of_context, packaged),
        "position": partial(of_position, packaged),
    }
    for name, source in more.items():
        makers[name] = partial(of_encoder, open_encoder(source, packaged.preprocessing))
    wanted = names or [*makers, *SEGMENTED]
    rows: dict[str, Tokens] = {}
    for name, make in makers.items():
        if name in wanted or (name == "position" and set(SEGMENTED) & set(wanted)):
            rows |= retained_rows(keep, [name], lambda make=make, name=name: [tokens_of(make(), frames, name)])  # type: ignore[misc]
    segmenter = with_calibration(load_segmenter(), flip=False)
    if {"segmenter", "biomarkers"} & set(wanted):
        trained = partial(segmented, segmenter, frames, rows["position"], packaged)
        rows |= retained_rows(keep, ["segmenter", "biomarkers"], trained)
    if "random_segmenter" in wanted:
        torch.manual_seed(0)
        random = Segmenter(type(segmenter.network)(segmenter.network.size), segmenter.calibration)
        untrained = partial(segmented, random, frames, rows["position"], packaged)
        rows |= retained_rows(keep, ["random_segmenter", "random_biomarkers"], untrained)
    return {name: tokens for name, tokens in rows.items() if name in wanted}


def eyes_of(rows: Mapping[str, Tokens], frames: Sequence[Frame]) -> dict[str, np.ndarray]:
    """One vector per eye of each row, eyes by name."""
    return {name: pooled(row.features, [frames[number].eye.name for number in row.frame]) for name, row in rows.items()}


def main() -> int:
    """Measures and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoders", nargs="*", metavar="NAME=ENCODER", help="more rows")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--out", type=Path, help="folder of the page; default: print the results")
    parser.add_argument("--only", nargs="+", help="measure these rows and keep the others of the page in --out")
    parser.add_argument("--keep", type=Path, help="folder that keeps the tokens of every row, for the next time")
    parser.add_argument("--limit", type=int, help="read this many eyes only, to try the command")
    arguments = parser.parse_args()
    folder = arguments.shared / "real" / "macular_edema_bscans"
    if not folder.is_dir():
        print(f"{folder} is absent: nothing is measured")
        return 0
    packaged = load_encoder("phantom-tiny")
    with tempfile.TemporaryDirectory() as temporary:
        if arguments.limit:
            for path in sorted(folder.glob("*.npz"))[:: max(1, 79 // arguments.limit)]:
                (Path(temporary) / path.name).symlink_to(path)
            folder = Path(temporary)
        frames, refused = read_frames(folder, packaged)
    more = dict(argument.split("=", 1) for argument in arguments.encoders)
    rows = measure_rows(arguments.only, more, frames, packaged, arguments.keep)
    results = {
        "frames": len(frames),
        "eyes": len({frame.eye.name for frame in frames}),
        "groups": len({frame.eye.group for frame in frames}),
        "refused": refused,
        "lesions": lesions({name: row for name, row in rows.items() if name != "biomarkers"}, frames, packaged),
        "diagnoses": diagnoses(eyes_of(rows, frames), frames),
    }
    if arguments.only and arguments.out is not None:
        results = merged(results, json.loads((records_of(arguments.out) / "bscans.json").read_text(encoding="utf-8")))
    if arguments.out is None:
        print(json.dumps(results, indent=1))
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_json(records_of(arguments.out) / "bscans.json", results)
        (arguments.out / "bscans.md").write_text(page(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
