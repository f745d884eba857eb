"""A scan that fills a part of the grid alone is shown, and read, where it holds tissue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from index_entries import index_entry
from octjepa.report.figures import eyes, tokens
from octjepa.store import Store
from octjepa.store.index import IndexEntry
from octjepa.viewer.scans import Scans
from octjepa.views import geometry
from octjepa.views.sample import select_tissue_tokens
from octjepa.views.tokens import holds_tissue, select, select_tissue
from octjepa.volume import CanonicalVolume
from synthetic import small_recipe, volume

SLICE = 1  # of eight, the only one with tissue: a quarter of the tokens' four slices, and less where the band ends


def sparse_eye() -> CanonicalVolume:
    recipe = small_recipe()
    whole = volume(recipe.preprocessing)
    pixels, band = whole.pixels.copy(), whole.band.copy()
    others = np.arange(len(pixels)) != SLICE
    pixels[others], band[:, others] = 0, -1
    band[:, SLICE, ::2] = -1  # and every second A-scan was cut: no token has a quarter of tissue
    return replace(whole, pixels=pixels, band=band)


def as_store(eye: CanonicalVolume) -> Store:
    preprocessing = small_recipe().preprocessing
    return SimpleNamespace(preprocessing=preprocessing, read=lambda volume_id: eye)  # type: ignore[return-value]


ROW = IndexEntry(**index_entry(0, device="zeiss_cirrus", volume_id="a"))


@pytest.mark.parametrize(
    ("tissue", "slice_"),
    [([5, 5, 5, 5], 2), ([0, 9, 0, 0], 1), ([9, 4, 0, 0], 0), ([9, 5, 0, 0], 1), ([0, 0, 0], 1), ([0, 0, 0, 0, 3], 4)],
)
def test_the_slice_nearest_to_the_middle_that_holds_enough_tissue_is_shown(tissue: list[int], slice_: int) -> None:
    assert eyes.central(np.array(tissue)) == slice_


def test_report_and_viewer_open_on_tissue(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eye, shown = sparse_eye(), []
    drawn = eyes.svg.scan
    monkeypatch.setattr(
        eyes.svg, "scan", lambda pixels, *given, **named: shown.append(pixels) or drawn(pixels, *given, **named)
    )
    eyes.eye_picture(as_store(eye), ROW)
    assert np.array_equal(shown[0], eye.pixels[SLICE])
    scans = Scans(Store.open(made / "store"))
    monkeypatch.setattr(scans, "_volume", lambda volume_id: eye)
    assert scans.central("a") == SLICE


def test_the_tokens_of_a_sparse_scan_are_those_with_tissue(monkeypatch: pytest.MonkeyPatch) -> None:
    eye, recipe = sparse_eye(), small_recipe()
    view, index, share = select_tissue_tokens(eye, recipe, geometry.center_crop(recipe.preprocessing))
    assert 0 < share.max() < 0.25
    held = holds_tissue(share)
    assert 0 < held.sum() < len(share) / 2
    assert set(np.flatnonzero(held)) <= set(index)
    drawn = select(share, int(held.sum()), np.random.default_rng(0))
    assert set(drawn) == set(np.flatnonzero(held))
    # The picture: the B-scan with tissue, its tokens coloured.
    features = np.random.default_rng(0).normal(size=(len(index), 8)).astype(np.float32)
    encoder = SimpleNamespace(
        recipe=recipe,
        tokens=lambda volume: SimpleNamespace(
            features=features, tissue=share[index], grid_index=index, grid=recipe.grid
        ),
    )
    shown = []
    drawn_scan = tokens.svg.scan
    monkeypatch.setattr(tokens.svg, "scan", lambda pixels, *given: shown.append(pixels) or drawn_scan(pixels, *given))
    maps = tokens.token_maps(as_store(eye), [ROW], encoder)  # type: ignore[arg-type]
    assert np.array_equal(shown[1], view[SLICE])
    assert maps.tokens == held.sum()


def test_scans_with_whole_tissue_are_selected_as_before() -> None:
    share = np.random.default_rng(0).uniform(size=64).astype(np.float32)
    assert np.array_equal(holds_tissue(share), share >= 0.25)
    assert not holds_tissue(np.zeros(8, np.float32)).any()
    assert not holds_tissue(np.zeros(0, np.float32)).any()
    assert len(select_tissue(np.zeros(64, np.float32), (4, 4, 4))) == 32
