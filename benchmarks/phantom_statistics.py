"""Prints how phantom eyes compare with figures measured on real ones, as a Markdown table.

    python benchmarks/phantom_statistics.py [--people N] [--real FOLDER]

Phantoms are full-size. Where a folder with real OPT DICOM files is given (or OCTJEPA_DATA names one), one column per
file is measured by the same code; columns that need true surfaces stay empty there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from octjepa.phantom import make_eye
from octjepa.phantom.statistics import (
    REFERENCE,
    REFERENCE_THICKNESS,
    measure_pixels,
    measure_thickness,
    measure_truth,
)
from octjepa.recipe import DEVICES


def mean_of(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.nanmean([row[name] for row in rows])) for name in rows[0]}


def measure_real(path: Path) -> dict[str, float]:
    import pydicom

    dataset = pydicom.dcmread(path)
    measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    dy, dx = map(float, measures.PixelSpacing)
    return measure_pixels(dataset.pixel_array, (float(measures.SliceThickness), dy, dx))


def print_table(columns: dict[str, dict[str, float]], reference: Callable[[str], str]) -> None:
    names = sorted({name for column in columns.values() for name in column}, key=lambda name: (name.split()[0], name))
    print("| figure | reference | " + " | ".join(columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    for name in names:
        cells = [f"{column[name]:.2f}" if np.isfinite(column.get(name, np.nan)) else "" for column in columns.values()]
        print(f"| {name} | {reference(name)} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=1, help="eyes per device (full size: 3 to 15 seconds each)")
    parser.add_argument("--devices", nargs="+", default=list(DEVICES))
    parser.add_argument("--real", type=Path, default=os.environ.get("OCTJEPA_DATA"))
    arguments = parser.parse_args()
    columns: dict[str, dict[str, float]] = {}
    for device in arguments.devices:
        rows = []
        for person in range(arguments.people):
            eye = make_eye(0, person, "OD", device, "full")
            rows.append(measure_pixels(eye.pixels, eye.spacing_mm) | measure_truth(eye))
        columns[device] = mean_of(rows)
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
        print("\nNo measured reference for these\n")
        print_table(others, lambda name: "")
    print("\nThickness, 40 healthy right eyes\n")
    print_table({"phantom": measure_thickness(0, 40)}, lambda name: REFERENCE_THICKNESS[name])


if __name__ == "__main__":
    main()
