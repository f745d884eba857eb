"""Occlusion on the page: colours that mean something, the right place in the scan as it was read, fair cases."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from octjepa.errors import OctjepaError
from octjepa.explain.eyes import OccludedVolume, select_test_cases
from octjepa.explain.occlusion import Occlusion
from octjepa.report import occlusion
from octjepa.report.occlusion import LEVELS, colour_levels, draw_maps
from octjepa.store import Store
from octjepa.store.index import entries_of

NAN = np.nan


def cells(drawn: list[str]) -> dict[str, set[tuple[float, float]]]:
    """Class -> upper left corners (x, y) of its cells."""
    found = {}
    for path in drawn:
        if path:
            (css,) = re.findall(r'class="([^"]+)"', path)
            found[css] = {(float(x), float(y)) for x, y in re.findall(r"M([\d.]+) ([\d.]+)", path)}
    return found


def test_strength_and_sign_are_drawn_where_they_were_measured() -> None:
    drawn = colour_levels(np.array([[1.0, 0.5, NAN], [-1.0, 0.2, 0.0]]), 1.0, 0.25, (16, 8))
    assert cells(drawn) == {
        f"occ-for s{LEVELS}": {(0, 0)},
        f"occ-for s{LEVELS // 2}": {(8, 0)},
        f"occ-against s{LEVELS}": {(0, 16)},
    }


@pytest.mark.slow
def test_every_strength_has_its_rule(page: str) -> None:
    assert all(f".s{step}{{fill-opacity:" in page for step in range(1, LEVELS + 1))
    assert ".occ-for{fill:" in page
    assert ".occ-against{fill:" in page


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Store:
    return Store.open(shutil.copytree(made / "store", tmp_path / "store"))


def occluded(store: Store, strongest: float, by_chance: float, mirrored: bool = False) -> OccludedVolume:
    """A map of the first volume with one place in it: slab 0, column 6, row 4 of the grid 4 x 8 x 8."""
    entry = replace(entries_of(store.table[:1])[0], mirrored=mirrored)
    en_face, b_scan = np.zeros((4, 8)), np.full((8, 8), NAN)
    en_face[0, 6] = b_scan[4, 6] = strongest
    found = Occlusion(en_face, b_scan, 0, 6, (by_chance, by_chance), NAN)
    return OccludedVolume(entry, store.read(entry.volume_id), found)


def recipe() -> Any:
    from octjepa.config import load_recipe

    return load_recipe("tiny_cpu")


def test_a_position_lies_over_its_own_voxels_and_is_named_as_in_the_scan_that_was_read(store: Store) -> None:
    # 128 columns of 0.047 mm about the centre; the scan has 160 A-scans of 0.04 mm, 24 B-scans of 0.26 mm
    (right,) = draw_maps(store, [occluded(store, 1.0, 0.0)], recipe(), 0.05).pictures
    assert cells(re.findall(r"<path[^>]*occ[^>]*>", right.en_face)) == {f"occ-for s{LEVELS}": {(6 * 16, 0)}}
    assert cells(re.findall(r"<path[^>]*occ[^>]*>", right.b_scan)) == {f"occ-for s{LEVELS}": {(6 * 16, 4 * 16)}}
    from_centre_mm = (6.5 * 16 - 64) * 0.047
    assert right.a_scan_number == (round(79.5 + from_centre_mm / 0.04) + 1, 160)
    assert right.b_scan_number == (round(11.5 - 1.5 * 4 * 0.36 / 0.26) + 1, 24)
    index = store.path / "volumes.parquet"
    table = pd.read_parquet(index)
    table.assign(mirrored=True).to_parquet(index)
    again = Store.open(store.path)
    (left,) = draw_maps(again, [occluded(again, 1.0, 0.0, mirrored=True)], recipe(), 0.05).pictures
    assert left.a_scan_number == (round(79.5 - from_centre_mm / 0.04) + 1, 160)
    assert left.b_scan_number == right.b_scan_number
    assert left.en_face == right.en_face


def test_a_map_of_nothing_has_no_colour_and_chance_is_reported_from_a_position(store: Store) -> None:
    def drawn(strongest: float, by_chance: float) -> tuple[int, bool]:
        maps = draw_maps(store, [occluded(store, strongest, by_chance)], recipe(), 0.05)
        one = maps.pictures[0]
        return len(re.findall("occ-", one.en_face + one.b_scan)), one.stands_out

    assert drawn(0.2, 0.1) == (2, True)
    assert drawn(0.2, 0.3) == (0, False)
    assert drawn(0.002, 0.0) == (0, True)  # a tenth of a hundredth of what the colour begins with


def test_eyes_of_a_page_share_their_scale_and_its_unit(store: Store) -> None:
    strong, weak = occluded(store, 0.8, 0.0), occluded(store, 0.4, 0.0)
    maps = draw_maps(store, [strong, weak], recipe(), 0.05, unit=0.5)
    assert (maps.max_en_face, maps.max_b_scan) == pytest.approx((1.6, 1.6))
    assert [one.strongest for one in maps.pictures] == pytest.approx([1.6, 0.8])
    assert f"occ-for s{LEVELS // 2}" in maps.pictures[1].en_face
    assert maps.column_mm == pytest.approx((1.44, 3 * 0.752))
    assert maps.position_mm == pytest.approx((1.44, 0.1248, 3 * 0.752))


def predictions(
    *rows: tuple[str, str, str], target: str = "sign", split: str = "test", level: str = "volume"
) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=["volume_id", "truth", "predicted"])
    return table.assign(target=target, split=split, level=level, scores=[[0.2, 0.8]] * len(table))


def test_cases_are_the_first_right_and_the_first_wrong_of_each_class() -> None:
    rows = predictions(("d", "1", "0"), ("c", "1", "1"), ("b", "1", "1"), ("a", "0", "0"), ("e", "", "1"))
    others = [
        predictions(("0", "1", "1"), **kind) for kind in ({"target": "other"}, {"split": "val"}, {"level": "eye"})
    ]
    chosen = select_test_cases(pd.concat([rows, *others]), "sign", ("0", "1"))
    assert [(one["volume_id"], one["prediction"]) for one in chosen] == [("a", "0"), ("b", "1"), ("d", "0")]
    assert chosen[1]["caption"] == "predicted 1 with 0.80: correct"
    assert chosen[2]["caption"] == "predicted 0 with 0.20: wrong, it is 1"
    assert select_test_cases(pd.concat(others), "sign", ("0", "1")) == []


def test_of_a_quantity_the_median_error_and_the_greatest() -> None:
    rows = predictions(("a", "50", "51"), ("b", "60", "63"), ("c", "40", "70"))
    chosen = select_test_cases(rows, "sign", ())
    assert [one["volume_id"] for one in chosen] == ["b", "c"]
    assert chosen[1]["caption"] == "greatest error: predicted 70, true 40"
    assert [one["volume_id"] for one in select_test_cases(rows[:1], "sign", ())] == ["a"]


def test_an_encoder_too_large_for_a_page_is_reported(store: Store, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octjepa.explain.eyes.FLOP_PER_THREAD", 1e9)
    with pytest.raises(
        OctjepaError, match=r"costs 0 TFLOP, more than the 0 that a page may take on this machine: make"
    ):
        occlusion.run_maps(store, made / "run")


def test_one_person_gives_no_scale(store: Store, made: Path) -> None:
    index = store.path / "volumes.parquet"
    table = pd.read_parquet(index)
    table.assign(split="train").where(table["person_id"] != "1005", table).to_parquet(index)
    with pytest.raises(OctjepaError, match=r"needs at least two people .*: found 1 held-out person$"):
        occlusion.run_maps(Store.open(store.path), made / "run")
    table.assign(split="train").to_parquet(index)
    assert occlusion.run_maps(Store.open(store.path), made / "run") is None


def test_damaged_predictions_are_reported(made: Path, store: Store, tmp_path: Path, as_tuned: Any) -> None:
    (tmp_path / "tuning").mkdir()
    as_tuned(tmp_path / "tuning")
    (tmp_path / "tuning" / "predictions.parquet").write_bytes(b"no table")
    with pytest.raises(OctjepaError, match=r"predictions\.parquet cannot be read"):
        occlusion.tuning_maps(store, tmp_path / "tuning")
