"""Every defect has its outcome: the table of tests/zoo, row by row, against the reader.

Defects that the reader does not decide about (left out, a second copy, a blank scan) are in `tests/store/test_zoo.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tests.zoo import DEFECTS, Defect, write_broken
from tests.zoo.headers import PATIENT_NAME

from octjepa.errors import VolumeRejected
from octjepa.phantom import DEVICES, DIALECTS, make_eye
from octjepa.phantom.cohort import MANIFEST_COLUMNS, manifest_row, write_tsv
from octjepa.phantom.dicom import sop_uid, write_eye
from octjepa.phantom.eye import Eye
from octjepa.read.manifest import find_row
from octjepa.read.reader import read_volume
from octjepa.reasons import REASONS
from octjepa.volume import AXES, OCTVolume

SEED = 3
LATER = {"blank", "duplicate_content", "duplicate_sop_uid", "manifest_row_without_file"}
LATER_NOTES = {"blank_frames", "fill_masked"}
READ = [defect for defect in DEFECTS.values() if defect.outcome != "ignored" and not LATER & set(defect.reasons)]
# Every defect on one device, in turn; what speaks of geometry on all, for each is silent or wrong in its own way.
CASES = [(defect, defect.devices[index % len(defect.devices)]) for index, defect in enumerate(READ)]
SWEEP = [(defect, device) for defect in READ if defect.level == "geometry" for device in defect.devices]


@cache
def eye(device: str) -> Eye:
    return make_eye(SEED, 1, "OS", device)


def target_path(root: Path, device: str) -> Path:
    person = eye(device).person.person_id
    folder = root / "retinal_oct" / "structural_oct" / device / person
    folder.mkdir(parents=True)
    return folder / f"{person}_{DIALECTS[device].protocol.replace(' ', '_')}_oct_l_{sop_uid(SEED, eye(device))}.dcm"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OCTVolume]:
    """The same eyes, read from good files."""
    found = {}
    for device in DEVICES:
        path = target_path(tmp_path_factory.mktemp(device), device)
        write_eye(path, eye(device), SEED)
        found[device] = read_volume(path)
    return found


def write_defect(defect: Defect, device: str, root: Path) -> Path:
    path = target_path(root, device)
    row = manifest_row(eye(device), sop_uid(SEED, eye(device)), "/" + path.relative_to(root).as_posix(), SEED)
    written, row = write_broken(path, eye(device), SEED, defect, row)
    if row:
        write_tsv(root / "retinal_oct" / "manifest.tsv", MANIFEST_COLUMNS, [row])
    return written[-1]


def similarity(pixels: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Correlation of each B-scan with its counterpart."""
    one, two = (frames.reshape(len(frames), -1).astype(np.float64) for frames in (pixels, other))
    one, two = (frames - frames.mean(axis=1, keepdims=True) for frames in (one, two))
    return (one * two).sum(axis=1) / np.sqrt((one**2).sum(axis=1) * (two**2).sum(axis=1) + 1e-9)


def check_volume(defect: Defect, volume: OCTVolume, good: OCTVolume, true_mm: tuple[float, float, float]) -> None:
    notes = {note.partition("=")[0] for note in volume.notes}
    assert set(defect.notes) - LATER_NOTES <= notes
    assert volume.pattern == defect.pattern
    assert volume.person_id == good.person_id
    assert volume.laterality == good.laterality
    for axis, true, found in zip(AXES, true_mm, volume.spacing_mm, strict=True):
        right = abs(found - true) <= 0.05 * true
        assert right or (axis in defect.uncertain and axis in volume.uncertain), (axis, true, found, volume.provenance)
    assert dict(defect.provenance).items() <= volume.provenance.items()
    if defect.same_pixels:
        assert volume.shape == (good.shape[0] - defect.fewer_frames, *good.shape[1:])
        similar = similarity(volume.pixels, good.pixels)
        if "positions_missing" in notes:  # nothing tells the first B-scan from the last
            similar = max(similar, similarity(volume.pixels[::-1], good.pixels), key=np.median)
        assert np.median(similar) > 0.98
        assert (similar < 0.9).sum() <= 3
    assert PATIENT_NAME not in repr(volume)


def check_outcome(defect: Defect, device: str, root: Path, good: dict[str, OCTVolume]) -> None:
    path = write_defect(defect, device, root)
    row = find_row(path)
    if defect.outcome == "accepted":
        check_volume(defect, read_volume(path, row), good[device], eye(device).spacing_mm)
        return
    with pytest.raises(VolumeRejected) as caught:
        read_volume(path, row)
    assert caught.value.reason in defect.reasons, str(caught.value)


@pytest.mark.parametrize(("defect", "device"), CASES, ids=lambda value: getattr(value, "name", value))
@pytest.mark.slow
def test_every_defect(defect: Defect, device: str, good: dict[str, OCTVolume], tmp_path: Path) -> None:
    check_outcome(defect, device, tmp_path, good)


@pytest.mark.slow
@pytest.mark.parametrize(("defect", "device"), SWEEP, ids=lambda value: getattr(value, "name", value))
def test_geometry_on_every_device(
    defect: Defect, device: str, good: dict[str, OCTVolume], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompressed, for speed: each device's own transfer syntax is in `test_every_defect`."""
    monkeypatch.setitem(DIALECTS, device, replace(DIALECTS[device], codec="native"))
    check_outcome(defect, device, tmp_path, good)


def test_the_table_is_whole() -> None:
    assert len(DEFECTS) >= 40
    for name, defect in DEFECTS.items():
        assert name == defect.name
        assert set(defect.reasons) <= set(REASONS), name
        assert bool(defect.reasons) == (defect.outcome == "refused"), name
        assert len(defect.reasons) <= 3 or name == "sent_as_text", (
            f"{name}: an outcome that allows every reason checks nothing"
        )
        assert set(defect.uncertain) <= set(AXES)
        assert defect.devices


def expectation(defect: Defect) -> str:
    """The required outcome of a defect, in words."""
    if defect.outcome == "ignored":
        return "ignored and counted"
    if defect.outcome == "refused":
        return "refused: " + " or ".join(f"`{reason}`" for reason in defect.reasons)
    details = [f"note `{note}`" for note in defect.notes]
    details += [f"{axis} from {source}" for axis, source in defect.provenance]
    details += [f"{', '.join(defect.uncertain)} spacing true or marked uncertain"] if defect.uncertain else []
    details += [f"pattern {defect.pattern}"] if defect.pattern != "raster" else []
    return "accepted" + (": " if details else "") + "; ".join(details)


def table() -> str:
    """The Markdown table of `docs/zoo.md`, level by level: print it to update that page."""
    levels = ("file", "frames", "header", "geometry", "identity", "pixels")
    lines = ["| defect | level | what is wrong | required outcome |", "|---|---|---|---|"]
    for defect in sorted(DEFECTS.values(), key=lambda defect: levels.index(defect.level)):
        lines.append(f"| `{defect.name}` | {defect.level} | {defect.description} | {expectation(defect)} |")
    return "\n".join(lines)


def test_the_page_prints_the_table(root: Path) -> None:
    assert table() in (root / "docs" / "zoo.md").read_text(encoding="utf-8")
