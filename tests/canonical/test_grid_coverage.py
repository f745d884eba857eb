"""What of a scan's tissue lies outside the grid is counted, noted above a limit, and reported by `octjepa plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from command_line import call
from index_entries import index_entry, store_of
from octjepa.canonical.grid_coverage import cohort_coverage, share_of_depth_outside
from octjepa.canonical.pipeline import canonicalise
from octjepa.ingest.note_warnings import note_warnings
from octjepa.recipe import Preprocessing
from shaped_eye import shaped_eye

COLUMNS = ("outside_slice", "outside_depth", "outside_column")


def test_a_scan_within_the_grid_is_whole_and_unnoted() -> None:
    made = canonicalise(shaped_eye("topcon_maestro2", seed=3).volume, Preprocessing())
    shares = [float(made.measurements[name]) for name in COLUMNS]
    assert shares[1:] == [0.0, 0.0]
    assert shares[0] == pytest.approx(2 / 28)  # the outermost line on both sides
    assert not any("outside" in note for note in made.notes)


def test_a_field_of_twelve_millimetres_is_noted() -> None:
    volume = shaped_eye("topcon_maestro2", seed=3).volume
    dz, dy, dx = volume.spacing_mm
    wide = replace(volume, spacing_mm=(dz, dy, 2 * dx), content_hash="")
    made = canonicalise(wide, Preprocessing())
    outside = float(made.measurements["outside_column"])
    assert outside == pytest.approx(1 - 128 * 0.047 / (168 * 2 * dx), abs=0.01)
    assert any(note.startswith("field_outside=0.5") for note in made.notes)


def test_a_retina_higher_than_the_view_is_noted_with_the_share_that_is_cut() -> None:
    eye = shaped_eye("heidelberg_spectralis", seed=3)
    low = Preprocessing(image_size=(16, 64, 128), margin=(0, 0, 8))  # 0.32 mm above Bruch's membrane
    made = canonicalise(eye.volume, low)
    assert any(note.startswith("depth_outside=") for note in made.notes)
    dy = eye.volume.spacing_mm[1]
    above_mm, thick_mm = 0.65 * 63 * 0.0078, (eye.bm - eye.ilm) * dy
    true = np.maximum(thick_mm - above_mm, 0).sum() / (thick_mm + 0.15).sum()
    assert float(made.measurements["outside_depth"]) == pytest.approx(true, abs=0.01)
    assert true > 0.01


def test_depth_shares_by_hand() -> None:
    ilm, bottom = np.array([[2.0, 12.0, -20.0]]), np.array([[14.0, 24.0, -10.0]])
    # Within 4..20: 10 of 12, 8 of 12, none of 10.
    assert share_of_depth_outside(ilm, bottom, 4, 20) == pytest.approx((2 + 4 + 10) / 34)


@pytest.mark.slow
def test_plan_reports_what_the_cohort_loses_and_what_would_hold_it(tmp_path: Path) -> None:
    wide = {"native_w": 1000, "outside_slice": 0.0, "outside_depth": 0.0, "outside_column": 0.5}  # 12 mm
    high = {"outside_slice": 0.0, "outside_depth": 0.02, "outside_column": 0.0}
    rows = [index_entry(number, split="train", **(wide if number < 6 else high)) for number in range(8)]
    store = store_of(tmp_path / "store", [*rows, index_entry(9, split="train")])  # the last was not measured
    coverage = cohort_coverage(store.table, [row["volume_id"] for row in rows], Preprocessing())
    assert coverage is not None
    assert coverage.column == pytest.approx(6 * 0.5 / 8)
    assert coverage.depth == pytest.approx(2 * 0.02 / 8)
    assert (coverage.volumes, coverage.field_cut, coverage.depth_cut) == (8, 6, 2)
    assert coverage.image_size_needed == {"slice": 20, "column": 256}
    outcome = call("plan", "tiny_cpu", "--store", store.path, "--json")
    assert outcome.json["tissue_outside"] == coverage.to_json()
    output = call("plan", "tiny_cpu", "--store", store.path)
    assert "Of 8 volumes 6 lose more than 20% of the field, 2 more than 0.1% in depth" in output.out
    assert "256 voxels along column" in output.out


def test_a_store_of_older_volumes_reports_nothing(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", [index_entry(0, split="train")])
    assert cohort_coverage(store.table, list(store.table["volume_id"]), Preprocessing()) is None


def test_an_ingest_of_wide_fields_says_what_is_cut_and_why_no_other_window_is_taken() -> None:
    notes = note_warnings({"field_outside": 3, "depth_outside": 1})
    warned = {message: count for count, _, message in notes if count}
    assert sorted(warned.values()) == [1, 3]
    for message in warned:
        assert "set by the recipe" in message
        assert "octjepa plan RECIPE --store STORE" in message
