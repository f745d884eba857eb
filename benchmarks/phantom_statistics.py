"""Prints how phantom eyes compare with figures measured on real ones, as a Markdown table.

    python benchmarks/phantom_statistics.py [--people N] [--real FOLDER]
    python benchmarks/phantom_statistics.py --histogram 300
    python benchmarks/phantom_statistics.py --picture docs/images/phantom.png

Phantoms are full-size. Where a folder with real OPT DICOM files is given (or OCTJEPA_DATA names one), one column per
file is measured by the same code; columns that need true surfaces stay empty there. `--histogram N` reports instead how
well the lesions of N people (small size) can be read from the intensity histogram or from the device alone: they should
not be, since lesions are structure. `--picture FILE` draws the dialects and lesions.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from phantom_measures import (
    REFERENCE,
    REFERENCE_THICKNESS,
    measure_pixels,
    measure_thickness,
    measure_truth,
)

from octjepa.phantom import DIALECTS, LESIONS, SURFACES, Eye, make_eye
from octjepa.phantom.eye import assemble_eye
from octjepa.phantom.person import EYES, make_person
from octjepa.recipe import DEVICES
from octjepa.volume import Laterality


def mean_of(eyes: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each statistic over eyes."""
    return {name: float(np.nanmean([eye[name] for eye in eyes])) for name in eyes[0]}


def measure_real(path: Path) -> dict[str, float]:
    """The statistics of a real DICOM file that need no truth."""
    import pydicom

    dataset = pydicom.dcmread(path)
    measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    dy, dx = map(float, measures.PixelSpacing)
    return measure_pixels(dataset.pixel_array, (float(measures.SliceThickness), dy, dx))


def print_table(columns: dict[str, dict[str, float]], reference: Callable[[str], str]) -> None:
    """Prints a Markdown table with one line per statistic."""
    names = sorted({name for column in columns.values() for name in column}, key=lambda name: (name.split()[0], name))
    print("| statistic | reference | " + " | ".join(columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    for name in names:
        cells = [f"{column[name]:.2f}" if np.isfinite(column.get(name, np.nan)) else "" for column in columns.values()]
        print(f"| {name} | {reference(name)} | " + " | ".join(cells) + " |")


def _histogram_features(task: tuple[int, Laterality]) -> tuple[np.ndarray, list[bool]]:
    person, side = task
    eye = make_eye(0, person, side, DEVICES[person % len(DEVICES)])
    counts = np.bincount(eye.pixels.ravel(), minlength=256) / eye.pixels.size
    shares = np.sqrt(counts.reshape(32, 8).sum(axis=1))
    percentiles = np.searchsorted(np.cumsum(counts), [0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.998]) / 255
    return np.concatenate([shares, percentiles]), list(eye.truth.labels.values())


def print_histogram_auroc(people: int) -> None:
    """AUROC per lesion of a logistic model, five folds by person, the best of three penalties (so rather high)."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import GroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    tasks = [(person, side) for person in range(people) for side in EYES]
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(_histogram_features, tasks, chunksize=8))
    features = np.array([row[0] for row in rows])
    labels = np.array([row[1] for row in rows]).astype(int)
    person = np.array([task[0] for task in tasks])
    device = person % len(DEVICES)
    within = features.copy()
    for k in range(len(DEVICES)):
        own = within[device == k]
        within[device == k] = (own - own.mean(axis=0)) / (own.std(axis=0) + 1e-6)
    print(f"\nAUROC from intensities alone, {people} people, {len(rows)} eyes\n")
    print("| features | " + " | ".join(LESIONS) + " | macro |")
    print("|---|" + "---|" * (len(LESIONS) + 1))
    print("| (prevalence) | " + " | ".join(f"{share:.2f}" for share in labels.mean(axis=0)) + " | |")
    sets = {"histogram": features, "histogram, z-scored per device": within, "device": np.eye(len(DEVICES))[device]}
    for name, matrix in sets.items():
        scores = []
        for k in range(len(LESIONS)):
            by_penalty = []
            for penalty in (0.01, 0.1, 1.0):
                model = make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=1000))
                folds = GroupKFold(5)
                decision = cross_val_predict(
                    model, matrix, labels[:, k], groups=person, cv=folds, method="decision_function"
                )
                by_penalty.append(roc_auc_score(labels[:, k], decision))
            scores.append(max(by_penalty))
        print(f"| {name} | " + " | ".join(f"{score:.2f}" for score in scores) + f" | {np.mean(scores):.2f} |")


def _eye_with(device: str, person: int, lesion: str = "") -> Eye:
    """A right eye with `lesion` of severity 0.75 and no other."""
    dialect = DIALECTS[device]
    severities = {lesion: 0.75} if lesion else {}
    return assemble_eye(
        1, dataclasses.replace(make_person(1, person), lesions={"OD": severities}), "OD", dialect, "small"
    )


def draw_picture(path: Path) -> None:
    """Draws the dialects, every lesion, true surfaces and two en face views."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 4, figsize=(14, 7.2))

    def show(axis: plt.Axes, eye: Eye, title: str, frame: int) -> None:
        stretch = 2 * eye.spacing_mm[1] / eye.spacing_mm[2]  # depth drawn at twice its size, as viewers do
        axis.imshow(eye.pixels[frame], cmap="gray", vmin=0, vmax=255, aspect=stretch)
        axis.set_title(title.replace("_", " "), fontsize=10)

    for axis, device in zip(axes[0], DEVICES, strict=True):
        eye = _eye_with(device, 3)
        show(axis, eye, device, round(eye.truth.fovea_mm[0] / eye.spacing_mm[0]))
    devices = ("heidelberg_spectralis", "zeiss_cirrus", "topcon_triton", "heidelberg_spectralis", "topcon_maestro2")
    for axis, lesion, device, person in zip(axes.ravel()[4:9], LESIONS, devices, (9, 4, 3, 5, 7), strict=True):
        eye = _eye_with(device, person, lesion)
        show(axis, eye, lesion, int(eye.truth.masks[lesion].any(axis=1).sum(axis=1).argmax()))
    eye = _eye_with("heidelberg_spectralis", 8, "subretinal_fluid")
    frame = int(eye.truth.masks["subretinal_fluid"].any(axis=1).sum(axis=1).argmax())
    show(axes[2, 1], eye, "true surfaces", frame)
    axes[2, 1].plot(eye.truth.surfaces_px[:, frame].T, linewidth=0.8)
    for axis, lesion in zip(axes[2, 2:], ("geographic_atrophy", ""), strict=True):
        eye = _eye_with("zeiss_cirrus", 12, lesion)
        slab = eye.truth.surfaces_px[SURFACES.index("bm")][:, None] + np.arange(3, 28)[None, :, None]
        rows = np.clip(slab, 0, eye.pixels.shape[1] - 1).astype(int)
        face = np.take_along_axis(eye.pixels, rows, axis=1).mean(axis=1)
        axis.imshow(face, cmap="gray", aspect=eye.spacing_mm[0] / eye.spacing_mm[2], interpolation="bilinear")
        axis.set_title(f"below Bruch's membrane, {lesion.replace('_', ' ') or 'healthy'}", fontsize=10)
    for axis in axes.ravel():
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=66, pil_kwargs={"optimize": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=1, help="eyes per device (full size: 3 to 15 seconds each)")
    parser.add_argument("--devices", nargs="+", default=list(DEVICES))
    parser.add_argument("--real", type=Path, default=os.environ.get("OCTJEPA_DATA"))
    parser.add_argument("--histogram", type=int, metavar="PEOPLE")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.picture:
        draw_picture(arguments.picture)
        return
    if arguments.histogram:
        print_histogram_auroc(arguments.histogram)
        return
    columns: dict[str, dict[str, float]] = {}
    for device in arguments.devices:
        eyes = []
        for person in range(arguments.people):
            eye = make_eye(0, person, "OD", device, "full")
            eyes.append(measure_pixels(eye.pixels, eye.spacing_mm) | measure_truth(eye))
        columns[device] = mean_of(eyes)
    for path in sorted(Path(arguments.real).glob("*.dcm")) if arguments.real else []:
        columns[f"real: {path.stem[:16]}"] = measure_real(path)
    for device in [device for device in REFERENCE if device in columns]:
        print(f"\nReference: {device}\n")
        shown = {name: row for name, row in columns.items() if name == device or name.startswith("real")}
        if device != "heidelberg_spectralis":
            shown = {device: columns[device]}
        print_table(shown, lambda name, device=device: REFERENCE[device].get(name, ""))
    others = {name: columns[name] for name in columns if name in DEVICES and name not in REFERENCE}
    if others:
        print("\nNo measured reference\n")
        print_table(others, lambda name: "")
    print("\nThickness, 40 healthy right eyes\n")
    print_table({"phantom": measure_thickness(0, 40)}, lambda name: REFERENCE_THICKNESS[name])


if __name__ == "__main__":
    main()
