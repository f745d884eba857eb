"""The ETDRS grid on maps whose sectors are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octjepa.tasks.thickness import (
    RADII_MM,
    SECTORS,
    ScanOrientation,
    draw_thickness,
    lines_of,
    sector_at,
    sector_means,
    thickness_um,
)

SHAPE, SPACING = (61, 121), (0.12, 0.06)  # 7.2 x 7.2 mm
CENTRE = (30 * 0.12, 60 * 0.06)


def sector_index(scan: ScanOrientation) -> np.ndarray:
    up, nasal = scan.signs
    slice_mm, column_mm = np.arange(SHAPE[0]) * SPACING[0], np.arange(SHAPE[1]) * SPACING[1]
    return sector_at(up * (slice_mm - CENTRE[0]), nasal * (column_mm - CENTRE[1]), bool(scan.eye))


def means_of(maps: np.ndarray, scan: ScanOrientation) -> np.ndarray:
    slice_mm, column_mm = np.arange(SHAPE[0]) * SPACING[0], np.arange(SHAPE[1]) * SPACING[1]
    return sector_means(maps, slice_mm, column_mm, scan)[0]


def lie(eye: str, first: str = "inferior") -> ScanOrientation:
    return ScanOrientation(eye, CENTRE, first)  # type: ignore[arg-type]


def test_thickness_is_rows_times_spacing_and_nothing_where_nothing_was_labelled() -> None:
    codes = np.zeros((1, 10, 3), np.uint8)
    codes[0, 2:6, 0] = 1
    codes[0, 6:7, 0] = 2
    codes[0, :, 2] = 255
    made = thickness_um(codes, 2, 0.004)
    assert made[0, 0].tolist()[:2] == pytest.approx([16, 0])
    assert made[1, 0].tolist()[:2] == pytest.approx([4, 0])
    assert np.isnan(made[:, 0, 2]).all()


@pytest.mark.parametrize(
    ("eye", "first", "location", "sector"),
    [
        ("OD", "inferior", (0, 1), "nasal"),
        ("OD", "inferior", (0, -1), "temporal"),
        ("OS", "inferior", (0, 1), "temporal"),
        ("OS", "inferior", (0, -1), "nasal"),
        ("OD", "inferior", (1, 0), "superior"),
        ("OS", "inferior", (-1, 0), "inferior"),
        ("OD", "superior", (1, 0), "inferior"),
        ("OS", "superior", (-1, 0), "superior"),
    ],
)
def test_sectors_of_either_eye(eye: str, first: str, location: tuple[int, int], sector: str) -> None:
    found = sector_index(lie(eye, first))
    for mm, ring in ((1.0, "inner"), (2.25, "outer")):
        at = 30 + round(location[0] * mm / SPACING[0]), 60 + round(location[1] * mm / SPACING[1])
        assert SECTORS[found[at]] == f"{ring}_{sector}"
    assert found[30, 60] == 0
    assert found[0, 0] == -1


def test_areas_and_means_are_those_of_the_circles() -> None:
    found = sector_index(lie("OD"))
    areas = [(found == location).sum() * SPACING[0] * SPACING[1] for location in range(9)]
    rings = np.pi * np.diff([0, *np.square(RADII_MM)])
    assert areas[0] == pytest.approx(rings[0], rel=0.05)
    assert sum(areas[1:5]) == pytest.approx(rings[1], rel=0.05)
    assert areas[5:] == pytest.approx([rings[2] / 4] * 4, rel=0.05)
    means = means_of(np.maximum(found, 0).astype(np.float32)[None], lie("OD"))
    assert means[0] == pytest.approx(np.arange(9))


def test_a_b_scan_counts_by_the_width_that_it_stands_for() -> None:
    slice_mm = CENTRE[0] + np.array([-0.4, -0.3, -0.2, -0.1, 0.0, 0.2, 0.4])  # twice as far apart above the fovea
    column_mm = np.arange(SHAPE[1]) * SPACING[1]
    maps = np.repeat((slice_mm > CENTRE[0])[:, None], SHAPE[1], axis=1).astype(np.float32)[None]
    means, measured = sector_means(maps, slice_mm, column_mm, lie("OD"))
    assert measured[0] == pytest.approx(1, abs=0.1)
    chords = 2 * np.sqrt(0.5**2 - (slice_mm - CENTRE[0]) ** 2)
    areas = chords * [0.1, 0.1, 0.1, 0.1, 0.15, 0.2, 0.2]
    assert means[0, 0] == pytest.approx(areas[5:].sum() / areas.sum(), abs=0.01)


def test_a_sector_that_is_hardly_seen_or_an_unknown_eye_has_no_mean() -> None:
    flat = np.ones((1, *SHAPE), np.float32)
    flat[:, :, 100:] = np.nan  # 2.4 mm to the right and more: less than half of the outer sector there is left
    flat[:, :, 85:100] = np.nan
    means = dict(zip(SECTORS, means_of(flat, lie("OD"))[0], strict=True))
    assert np.isnan(means["outer_nasal"])
    assert means["outer_temporal"] == 1
    unknown = dict(zip(SECTORS, means_of(np.ones((1, *SHAPE), np.float32), lie(""))[0], strict=True))
    assert {name for name, value in unknown.items() if np.isnan(value)} == {
        f"{ring}_{side}" for ring in ("inner", "outer") for side in ("nasal", "temporal")
    }
    off = means_of(np.ones((1, *SHAPE), np.float32), ScanOrientation("OD", (0.0, 0.0), "inferior"))[0]
    assert np.isfinite(off).sum() < 9


def test_the_figure_writes_every_class(tmp_path: Path) -> None:
    maps = np.ones((2, *SHAPE), np.float32)
    rows_mm = np.arange(SHAPE[0]) * SPACING[0]
    uneven_mm = np.concatenate([rows_mm[:30], 2 * rows_mm[30:] - rows_mm[30]])
    for slice_mm in (rows_mm, uneven_mm):
        for lines in ("horizontal", "vertical", "not parallel"):
            scan = lie("OS")._replace(lines=lines)
            path = draw_thickness(
                tmp_path / "new" / "map.svg",
                maps,
                means_of(maps, scan),
                ("a", "b"),
                slice_mm,
                np.arange(SHAPE[1]) * SPACING[1],
                scan,
                "eye",
            )
            assert path.stat().st_size > 5000


def test_a_single_b_scan_has_a_figure(tmp_path: Path) -> None:
    scan, column_mm = lie("OD"), np.arange(SHAPE[1]) * SPACING[1]
    maps = np.ones((1, 1, SHAPE[1]), np.float32)
    path = draw_thickness(
        tmp_path / "map.svg", maps, np.full((1, 9), np.nan), ("a",), np.zeros(1), column_mm, scan, "x"
    )
    assert path.stat().st_size > 5000


def test_b_scans_that_run_up_or_down_have_the_central_sector_alone() -> None:
    ones = np.ones((1, *SHAPE), np.float32)
    vertical = means_of(ones, lie("OD")._replace(lines=lines_of("raster", ["vertical_lines"])))[0]
    assert vertical[0] == 1
    assert np.isnan(vertical[1:]).all()
    assert np.isnan(means_of(ones, lie("OD")._replace(lines=lines_of("radial", [])))).all()
    assert np.isfinite(means_of(ones, lie("OD")._replace(lines=lines_of("unknown", [])))).all()
