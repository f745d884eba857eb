"""CPU-seconds of the viewer's server until the first B-scan of a full-size scan, and for what comes after it.

python benchmarks/viewer.py [--folder FOLDER] [DEVICE ...]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from octjepa import load_encoder
from octjepa.phantom import write_cohort
from octjepa.report.viewer.scans import Scans
from octjepa.report.viewer.server import open_scans
from octjepa.store.build import build_store

DEVICES = ("topcon_maestro2", "topcon_triton", "zeiss_cirrus", "heidelberg_spectralis")


def seconds(work: Callable[[], object]) -> float:
    """CPU-seconds of this process, all threads together."""
    started = time.process_time()
    work()
    return time.process_time() - started


def first_picture(scans: Scans, name: str) -> None:
    """What the page fetches before it draws the first B-scan."""
    number = scans.first(name)["slice"]
    if number is not None:
        scans.first_png(name)
        scans.surface_lines(name, "slice", number)


def whole_file(scans: Scans, name: str) -> None:
    """What the page fetched before it drew the first B-scan where there is no first one."""
    number = scans.native_about(name)["opening_slice"]
    scans.native_plane_png(name, "slice", number)
    scans.surface_lines(name, "slice", number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the phantoms and their stores are, or are written")
    parser.add_argument("devices", nargs="*", default=DEVICES)
    arguments = parser.parse_args()
    preprocessing = load_encoder("phantom-tiny").recipe.preprocessing
    print("| scan | first B-scan | the whole file | en face | thickness, ETDRS |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for device in arguments.devices:
            root = (arguments.folder or Path(temporary)) / device
            if not (root / "store").exists():
                write_cohort(root / "eyes", people=1, seed=3, devices=[device], size="full", workers=1)
                build_store([root / "eyes"], root / "store", preprocessing)
            for name in sorted(open_scans(root / "store").ids):
                scans = open_scans(root / "store")
                spent = [
                    seconds(work)
                    for work in (
                        lambda scans=scans, name=name: first_picture(scans, name),
                        lambda scans=scans, name=name: whole_file(scans, name),
                        lambda scans=scans, name=name: scans.native_face_png(name),
                        lambda scans=scans, name=name: (scans.thickness_png(name), scans.etdrs(name)),
                    )
                ]
                size = " x ".join(map(str, scans.native(name).volume.shape))
                print(f"| {device} {size} | {' | '.join(f'{value:.2f}' for value in spent)} |", flush=True)


if __name__ == "__main__":
    main()
