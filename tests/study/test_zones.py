"""The two readings of the same tokens: what is pooled where, and a page that says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.study.aims import MACRO
from benchmarks.study.features import Tokens
from benchmarks.study.results import row
from benchmarks.study.zones import POOLS, Job, differences, page, pooled


def test_the_page_is_that_of_the_committed_figures(root: Path) -> None:
    folder = root / "docs" / "study"
    kept = json.loads((folder / "zones.json").read_text(encoding="utf-8"))
    assert page(kept) == (folder / "zones.md").read_text(encoding="utf-8")
    assert {"intensity", "untrained", "mae", "vjepa"} <= {entry["arm"] for entry in kept["entries"].values()}
    assert len({entry["measured_by"] for entry in kept["entries"].values()}) == 1  # by the same code


def test_a_zone_without_a_token_is_nothing_and_the_others_keep_their_place() -> None:
    index = np.array([8 * 2, 8 * 2 + 7, 64 + 8 * 2 + 3])  # grid 4 x 8 x 8: two at the edge of row 2, one in its middle
    tokens = Tokens(np.array([[1.0, 2.0], [3.0, 0.0], [5.0, 7.0]], np.float16), index)
    (zones,) = pooled([tokens], (4, 8, 8), "zones").reshape(1, 16, 2, 2)
    assert zones[2 * 2].tolist() == [[5, 7], [5, 7]]
    assert zones[2 * 2 + 1].tolist() == [[2, 1], [3, 2]]
    assert not np.delete(zones, [4, 5], axis=0).any()
    assert pooled([tokens], (4, 8, 8), "mean_std_max").shape == (1, 6)


def test_differences_are_between_rows_read_alike_and_paired_by_person(tmp_path: Path) -> None:
    entries = {}
    rng = np.random.default_rng(0)
    people = rng.normal(0, 0.03, 400)
    values = {"intensity": (0.6,), "untrained": (0.65, 0.66), "vjepa": (0.7, 0.72)}
    for arm, found in values.items():
        for seed, value in enumerate(found):
            key = Job(arm, seed, list).key
            rows = [
                row(f"{arm}:{pool}", seed, MACRO, value + 0.1 * k, None, None, 360, key) for k, pool in enumerate(POOLS)
            ]
            entries[key] = {"arm": arm, "seed": seed, "rows": rows}
            for k, pool in enumerate(POOLS):
                np.savez(
                    tmp_path / f"{key}-{pool}.npz", **{MACRO: value + 0.1 * k + people + rng.normal(0, 0.003, 400)}
                )
    found = {(one["row"], one["minus"], one["pool"]): one for one in differences(entries, tmp_path, 180, "eyes")}
    assert {(ours, theirs) for ours, theirs, _ in found} == {
        ("vjepa", "untrained"), ("untrained", "intensity"), ("vjepa", "intensity")
    }  # fmt: skip
    one = found["vjepa", "untrained", "zones"]
    assert one["values"] == pytest.approx([0.05, 0.06])
    assert one["low"] < 0.055 < one["high"]
    assert found["vjepa", "intensity", "zones"]["values"] == pytest.approx([0.1, 0.12])  # its one seed against both
