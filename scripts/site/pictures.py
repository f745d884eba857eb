"""Makes the pictures of the viewer in docs/images anew, with chromium.

    python scripts/site/pictures.py [--folder FOLDER] [--out docs/images]

Full-size phantoms of four vendors are written to FOLDER and ingested (some minutes; what is there is used again); the
encoder is the shipped `phantom-truth`. Look at every picture before it is kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from octjepa import load_encoder
from octjepa.ingest.build import build_store
from octjepa.phantom import write_cohort
from octjepa.viewer.server import open_scans

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from browser import CHROMIUM, Page, browser_page  # noqa: E402
from viewer_server import served  # noqa: E402

DEVICES = ("topcon_triton", "topcon_maestro2", "zeiss_cirrus", "heidelberg_spectralis")
MEASURED = "document.querySelector('#pane-a .sectors table')"


def make_store(folder: Path) -> Path:
    """The store of one person's eyes by each device."""
    for device in DEVICES:
        if not (folder / "eyes" / device).exists():
            write_cohort(folder / "eyes" / device, people=1, seed=3, devices=[device], size="full", workers=1)
    if not (folder / "store").exists():
        build_store([folder / "eyes"], folder / "store", load_encoder("phantom-truth").recipe.preprocessing)
    return folder / "store"


def save(page: Page, path: Path) -> None:
    """The window as a PNG of 200 colours, which these pages need no more than."""
    with tempfile.TemporaryDirectory() as made:
        picture = Image.open(page.picture(Path(made) / "page.png", whole=False)).convert("RGB")
    picture.quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path} {picture.width} x {picture.height}, {path.stat().st_size / 1000:.0f} kB", flush=True)


def open_eye(page: Page, url: str, name: str) -> None:
    """The page of a volume with its thickness map, when all of it is drawn."""
    page.open(f"{url}/#{name}")
    page.wait(MEASURED, timeout=240)
    page.choose("#pane-a .native-plane", "thickness")
    page.wait("document.querySelector('#pane-a .face-figure figcaption').textContent.includes('Violet')", timeout=120)
    time.sleep(2)


def viewer_pictures(page: Page, store: Path, eyes: Path, out: Path) -> None:
    """viewer.png, viewer_dark.png with tokens and two devices side by side, and viewer_phone.png."""
    scans = open_scans(store, [str(eyes)], encoder="phantom-truth")
    entries = [scans.volumes.entry(name) for name in sorted(scans.ids)]
    names = {entry.device: entry.volume_id for entry in entries if entry.eye == "OD"}
    with served(scans) as url:
        page.look(1300, 1000)
        open_eye(page, url, names["topcon_triton"])
        page.click("#pane-a .native-caliper")
        page.drag("#pane-a .bscan", (0.25, 0.55), (0.25, 0.7))
        page.value("document.querySelector('main').scrollTo(0, 0)")
        save(page, out / "viewer.png")
        page.look(390, 1900, phone=True)
        time.sleep(1)
        page.value("window.scrollTo(0, document.querySelector('main').offsetTop)")
        save(page, out / "viewer_phone.png")
        page.look(1300, 1000, dark=True)
        open_eye(page, url, names["heidelberg_spectralis"])
        page.choose("#pane-a .native-stretch", 2)
        page.choose("#pane-a .native-layer", "tokens")
        page.choose("#compare", names["zeiss_cirrus"])
        page.wait("document.querySelector('#pane-b .sectors table')", timeout=240)
        time.sleep(2)
        save(page, out / "viewer_dark.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the phantoms and their store are, or are written")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    given = parser.parse_args()
    if CHROMIUM is None:
        raise SystemExit("no chromium on this machine")
    with tempfile.TemporaryDirectory() as made, browser_page(Path(made) / "profile") as page:
        folder = given.folder or Path(made)
        viewer_pictures(page, make_store(folder), folder / "eyes", given.out)


if __name__ == "__main__":
    main()
