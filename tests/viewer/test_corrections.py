"""Boundaries corrected by hand: what is written, where, from whom it is accepted, and that `adapt` learns from it."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octjepa.errors import UsageError
from octjepa.layers import BOUNDARIES
from octjepa.locks import file_lock
from octjepa.notes import Note
from octjepa.tasks.labels.label_files import LabelFolder, ScanNames
from octjepa.tasks.segmenter.adapt_scans import labelled_scan
from octjepa.tasks.segmenter.retained_layers import RetainedLayers
from octjepa.viewer.corrections import Corrections
from octjepa.volume import OCTVolume

NODE = shutil.which("node")
SHAPE = (5, 60, 40)
ENTRY = ScanNames("", "eye.dcm", "abc123")


def scan(*notes: str) -> OCTVolume:
    pixels = np.zeros(SHAPE, np.uint8)
    return OCTVolume(pixels, (0.1, 0.004, 0.02), {}, "someone", "device", notes=tuple(map(Note, notes)))


def lines(first: float = 10, gap: float = 4) -> list[list[float | None]]:
    """Eight flat boundaries."""
    return [[first + gap * number] * SHAPE[2] for number in range(8)]


@pytest.mark.parametrize("notes", [(), ("frames_reversed",)])
def test_what_is_saved_is_what_adapt_reads(tmp_path: Path, notes: tuple[str, ...]) -> None:
    corrections, volume = Corrections(tmp_path / "labels"), scan(*notes)
    first = lines()
    first[3][7] = None
    assert corrections.save("abc123", volume, 1, first) == [1]
    assert corrections.save("abc123", volume, 4, lines(12)) == [1, 4]
    folder = LabelFolder(tmp_path / "labels")
    file = folder.file_for(ENTRY)
    assert file == tmp_path / "labels" / "abc123_boundaries.npz"
    assert folder.source(file).startswith("corrected by hand in octjepa view")
    labels = folder.read(file, folder.names(file), SHAPE)
    labels.check(SHAPE, volume.spacing_mm, "file")
    learned = labelled_scan(volume, labels, "eye")
    assert learned.bscans == (1, 4)  # in the order in which the viewer shows the B-scans
    assert np.isnan(learned.boundaries_px[3, 1, 7])
    assert learned.boundaries_px[:, 4, 0].tolist() == [line[0] for line in lines(12)]
    with np.load(file) as arrays:
        assert arrays["names"].tolist() == list(BOUNDARIES)
        assert (
            np.isfinite(arrays["rows"]).any((0, 2)).tolist() == [False, True, False, False, True][:: -1 if notes else 1]
        )
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["abc123_boundaries.npz"]


def test_a_file_that_another_viewer_writes_is_not_changed(tmp_path: Path) -> None:
    corrections, volume = Corrections(tmp_path), scan()
    corrections.save("abc123", volume, 2, lines())
    with file_lock(tmp_path / "abc123_boundaries.npz"):
        with pytest.raises(UsageError, match="another process is writing to abc123_boundaries"):
            corrections.save("abc123", volume, 3, lines())
        with pytest.raises(UsageError, match="another process is writing to abc123_boundaries"):
            corrections.remove("abc123", volume, 2)
        assert corrections.save("other", volume, 3, lines()) == [3]
    assert Corrections(tmp_path).save("abc123", volume, 3, lines()) == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["abc123_boundaries.npz", "other_boundaries.npz"]


def test_saved_rows_replace_those_of_the_network(tmp_path: Path) -> None:
    corrections, volume = Corrections(tmp_path), scan()
    network = np.broadcast_to(np.arange(8, dtype=np.float32)[:, None, None], (8, SHAPE[0], SHAPE[2]))
    layers = RetainedLayers(network, np.full_like(network, 99), np.zeros(SHAPE, np.uint8), volume.spacing_mm)
    assert corrections.applied("abc123", volume, layers) is layers
    corrections.save("abc123", volume, 2, lines())
    shown = corrections.applied("abc123", volume, layers)
    assert (shown.boundaries_px[:, 2] == np.array(lines(), np.float32)).all()
    assert (shown.boundaries_px[:, 1] == network[:, 1]).all()
    assert (shown.expected_error_um[:, 2] == 0).all()
    assert (shown.expected_error_um[:, 1] == 99).all()
    assert Corrections(tmp_path).slices("abc123", volume) == [2]
    assert corrections.remove("abc123", volume, 3) == [2]
    assert corrections.remove("abc123", volume, 2) == []
    assert list(tmp_path.iterdir()) == []


def changed(boundary: int, column: int, value: Any) -> list[list[Any]]:
    rows: list[list[Any]] = lines()
    rows[boundary][column] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("rows", "expected 8 boundaries"),
        (lines()[:7], "expected 8 boundaries"),
        ([*lines()[:7], "bm"], "bm: expected a list of 40 rows"),
        ([*lines()[:7], [38.0] * 39], "bm: expected a list of 40 rows"),
        (changed(2, 5, "12"), "ipl_inl, column 6: expected a number"),
        (changed(2, 5, True), "ipl_inl, column 6: expected a number"),
        (changed(2, 5, [1]), "ipl_inl, column 6: expected a number"),
        (changed(0, 0, float("nan")), "ilm, column 1: the row is outside"),
        (changed(0, 0, float("-inf")), "ilm, column 1: the row is outside"),
        (changed(0, 0, -1), "ilm, column 1: the row is outside of the 60 rows"),
        (changed(7, 39, 10**400), "bm, column 40: the row is outside"),
        (changed(7, 39, 59.6), "bm, column 40: the row is outside"),
        (changed(4, 9, 5), "opl_onl, column 10: it lies above inl_opl"),
        ([[None] * 40] * 8, "fewer than 16 columns"),
        ([[10.0] * 15 + [None] * 25] * 8, "fewer than 16 columns"),
    ],
)
def test_wrong_boundaries_are_refused_and_nothing_is_written(tmp_path: Path, rows: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Corrections(tmp_path).save("abc123", scan(), 1, rows)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--corrections .* cannot be made"):
        Corrections(tmp_path / "file")
    folder = tmp_path / "labels"
    corrections, volume = Corrections(folder), scan()
    for number in (-1, 5):
        with pytest.raises(IndexError):
            corrections.save("abc123", volume, number, lines())
    for name in ("../abc123", "a/b", "", ".", "x" * 200):
        with pytest.raises(UsageError, match="not a plain word"):
            corrections.save(name, volume, 1, lines())
    with pytest.raises(UsageError, match="turned, sorted or dropped"):
        corrections.save("abc123", scan("frames_rotated", "frames_unordered"), 1, lines())
    target = tmp_path / "elsewhere.npz"
    (folder / "link_boundaries.npz").symlink_to(target)
    with pytest.raises(UsageError, match="is a link"):
        corrections.save("link", volume, 1, lines())
    assert not target.exists()
    np.savez(folder / "theirs_boundaries.npz", rows=np.zeros((8, 5, 40)), names=np.array(BOUNDARIES))
    before = (folder / "theirs_boundaries.npz").read_bytes()
    (folder / "damaged_boundaries.npz").write_bytes(b"PK")
    for name in ("theirs", "damaged"):
        with pytest.raises(UsageError, match="name another folder"):
            corrections.save(name, volume, 1, lines())
    assert (folder / "theirs_boundaries.npz").read_bytes() == before
    corrections.save("abc123", volume, 1, lines())
    with pytest.raises(UsageError, match="name another folder"):  # of another scan with this id
        corrections.save("abc123", replace(volume, pixels=np.zeros((4, 60, 40), np.uint8)), 1, lines())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "labels"]


@pytest.mark.skipif(NODE is None, reason="no node on this machine")
def test_changes_by_hand_move_a_boundary_and_never_cross_another() -> None:
    script = (
        files("octjepa.viewer").joinpath("static", "boundary_edit.js").read_text(encoding="utf-8")
        + """
const lines = [10, 14, 18].map((row) => Array(40).fill(row));
lines[1][3] = null;
const drawn = stroked(lines, 1, { column: 10.2, depth: 15 }, { column: 6, depth: 30 }, 60);
const moved = nudged(lines, 1, 20, -10, 60);
process.stdout.write(JSON.stringify({
  drawn, moved, before: lines,
  nearest: [
    nearest(lines, { column: 5, depth: 13 }), nearest(lines, { column: 3, depth: 13 }),
    nearest([[null], [null]], { column: 0, depth: 1 }),
  ],
  beyond: stroked(lines, 2, { column: -5, depth: 99 }, { column: 60, depth: 99 }, 60)[2],
}));"""
    )
    assert NODE is not None
    run = subprocess.run([NODE, "--input-type=module"], input=script, capture_output=True, text=True, check=True)
    made = json.loads(run.stdout)
    drawn, moved = (np.array(made[name], float) for name in ("drawn", "moved"))
    assert drawn[1, 6:11].tolist() == pytest.approx([30, 26.43, 22.86, 19.29, 15.71], abs=0.02)
    assert drawn[2, 6:11].tolist() == pytest.approx([30, 26.43, 22.86, 19.29, 18], abs=0.02)  # pushed
    assert (drawn[0] == 10).all()
    untouched = np.delete(drawn, range(6, 11), axis=1)
    assert (np.delete(untouched, 3, axis=1) == [[10], [14], [18]]).all()
    assert moved[1, 20] == 4
    assert moved[0, 20] == 4  # pushed
    assert 4 < moved[1, 26] < moved[1, 32] < 14
    assert made["drawn"][1][3] is None
    assert made["before"][0] == [10] * 40
    assert made["nearest"] == [1, 0, None]
    assert made["beyond"] == [59] * 40
