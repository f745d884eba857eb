"""CPU-seconds of the viewer's server until the first B-scan of a full-size scan, and for what comes after it.

    python benchmarks/viewer.py [--folder FOLDER] [--chromium] [DEVICE ...]

With --chromium also milliseconds from the click on an eye to its pictures on the page of a headless chromium, measured
in the page, with server and browser running: a phantom of the first device is opened before, the others are new.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from octjepa import load_encoder
from octjepa.ingest.build import build_store
from octjepa.phantom import write_cohort
from octjepa.viewer.scans import Scans
from octjepa.viewer.server import open_scans

DEVICES = ("topcon_maestro2", "topcon_triton", "zeiss_cirrus", "heidelberg_spectralis")


def seconds(work: Callable[[], object]) -> float:
    """CPU-seconds of this process, all threads together."""
    started = time.process_time()
    work()
    return time.process_time() - started


def first_picture(scans: Scans, name: str) -> None:
    """What the page fetches before it draws the first B-scan."""
    number = scans.first(name).number
    if number is not None:
        scans.first_png(name)
        scans.surface_lines(name, "slice", number)


def whole_file(scans: Scans, name: str) -> None:
    """What the page fetched before it drew the first B-scan where there is no first one."""
    number = scans.native(name).opening_slice
    scans.native_plane_png(name, "slice", number)
    scans.surface_lines(name, "slice", number)


# Resolves with milliseconds from the click to the first B-scan, and to the scan that was read whole and checked.
CLICK = """new Promise((resolve) => {
  const pane = document.querySelector('#pane-a'), begun = performance.now();
  let first = null;
  const look = new MutationObserver(() => {
    const status = pane.querySelector('.state').textContent, shown = !pane.querySelector('.native-body').hidden;
    if (shown && first === null && /first B-scan;|B-scans of/.test(status)) first = performance.now() - begun;
    if (shown && /B-scans of/.test(status)) { look.disconnect(); resolve([first, performance.now() - begun]); }
    else if (/Not shown/.test(status)) { look.disconnect(); resolve([null, null]); }
  });
  look.observe(pane, {subtree: true, attributes: true, childList: true, characterData: true});
  document.querySelector(`#list [data-id="%s"]`).click();
})"""


def in_chromium(root: Path) -> None:
    """The eyes of the store in `root`, each opened by a click."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from browser import browser_page
    from viewer_server import served

    scans = open_scans(root / "store", [str(root / "eyes")])
    print("\n| click on | first B-scan, ms | whole file, ms | load |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as profile, served(scans) as url, browser_page(Path(profile)) as page:
        page.look(1300, 900)
        page.open(f"{url}/")
        page.wait("document.querySelector('#pane-a .sectors table')", timeout=240)
        opened = page.value("document.querySelector('#list [aria-current=true]').dataset.id")
        for name in sorted(scans.ids - {opened}):
            time.sleep(3)  # the eye before is drawn whole
            first, whole = page.value(CLICK % name)
            device, load = scans.volumes.entry(name).device, os.getloadavg()[0]
            print(f"| {device} | {first:.0f} | {whole:.0f} | {load:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the phantoms and their stores are, or are written")
    parser.add_argument("--chromium", action="store_true", help="also from click to picture in the browser")
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
            if arguments.chromium:
                in_chromium(root)


if __name__ == "__main__":
    main()
