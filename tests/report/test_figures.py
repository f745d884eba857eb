"""The pictures show what they say: masks as drawn by the views, components free of order, honest axes."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from octjepa.cohort import examples
from octjepa.evaluate.results import ProbePaired, Row
from octjepa.report.figures import curves, eyes, forest, masks, svg
from octjepa.train.mask_statistics import single_family
from octjepa.views import geometry, tokens
from synthetic import small_recipe, volume


def test_en_face_is_bright_where_tissue_is_bright_and_black_without() -> None:
    pixels = np.full((4, 100, 12), 10, np.uint8)
    pixels[:, 40:80, 6:] = 200
    pixels[:, 40:80, 4:6] = 100
    band = np.stack([np.full((4, 12), 40), np.full((4, 12), 80)]).astype(np.int16)
    band[:, :, :4] = -1
    face = eyes.en_face(pixels, band, 0.0078)
    assert face.shape == (4, 12)
    assert (face[:, :3] == 0).all()
    assert (face[:, 8:] == 255).all()
    assert (face[:, 5] < 255).all()


def test_a_png_holds_the_pixels_that_were_given() -> None:
    pixels = np.zeros((8, 16), np.uint8)
    pixels[:, 8:] = 200
    uri = svg.png(pixels)
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("L"))
    assert image.shape == (16, 32)
    assert (image[:, :12] < 20).all()
    assert (image[:, 20:] > 180).all()


def test_a_boundary_breaks_where_nothing_was_found() -> None:
    depths = np.array([5.0, 6, np.nan, 7, 8, 9])
    lines = svg.boundary(depths, "band")
    assert len(lines) == 2
    assert "0.5 5L1.5 6" in lines[0]


@pytest.mark.parametrize("family", list(masks.FAMILIES))
def test_a_mask_picture_has_exactly_the_recipes_counts(made: Path, family: str) -> None:
    from octjepa.config import load_recipe
    from octjepa.store import Store

    recipe = load_recipe("tiny_cpu_vjepa", ["masks.runs=0", "masks.target_share=0.7"])
    store = Store.open(made / "store")
    picture = masks.mask_picture(store.read(store.table["volume_id"][0]), recipe, family)
    weights = single_family(recipe, family).masks
    assert {name for name in masks.FAMILIES if getattr(weights, name)} == {family}
    context, target = recipe.mask_counts
    assert picture.counts["seen"] == context
    assert picture.counts["predicted"] == target
    assert picture.counts["hidden"] == recipe.token_count - context - target
    assert sum(picture.counts.values()) == recipe.grid_tokens
    assert picture.in_use == (family in ("tubes", "blocks"))
    drawn = sum(len(re.findall("M", path)) for s in picture.slabs for path in re.findall(r'tok-target" d="([^"]+)', s))
    assert drawn == target


def test_masks_are_drawn_where_their_tokens_are_in_the_picture() -> None:
    """The picture is the centred view: masks of a cropped and flipped sample would lie next to its tissue."""
    recipe = small_recipe(views={"flip_slow": 1.0, "flip_fast": 1.0, "rotation_degrees": 20.0})
    size, patch = recipe.preprocessing.image_size, recipe.tokens.patch_size
    crop = geometry.center_crop(recipe.preprocessing)
    for number in range(4):
        eye = volume(recipe.preprocessing, number)
        eye.band[:, :4] = -1  # tissue in the second half of the B-scans only
        share = tokens.tissue_share_of_band(geometry.band_in_view(eye.band, crop, size), patch, size[1])
        tissue = tokens.holds_tissue(share).reshape(recipe.grid)
        assert 0 < tissue.sum() < recipe.token_count  # all of it is selected
        assert (masks.mask_states(eye, recipe, "random")[tissue] != masks.UNSELECTED).all()


def test_bins_keep_mean_and_range_of_long_curves() -> None:
    x = np.arange(1, 10_001.0)
    y = np.where(x == 5000, 50.0, 1.0)
    at, mean, low, high = curves.binned(x, y, 100)
    assert len(at) == 100
    assert high.max() == 50.0
    assert low.min() == 1.0
    assert mean.mean() == pytest.approx(y.mean())
    assert [len(part) for part in curves.binned(x[:3], y[:3], 100)] == [3] * 4


def test_charts_use_the_pages_colours_and_their_own_ids() -> None:
    lines = [{"update": u, "train/loss": 1 / u, "train/lr": 1e-3} for u in range(1, 30)]
    charts = curves.training_charts(lines, [{"update": 29, "val/loss": 0.2}])
    assert [chart.key for chart, _ in charts] == ["train/loss", "train/lr"]
    text = "".join(drawing for _, drawing in charts)
    assert "var(--ours)" in text
    assert "var(--other)" in text
    assert "#01020" not in text
    assert "DejaVu" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)


def test_a_baseline_far_above_the_curve_is_within_the_axes() -> None:
    lines = [{"update": u, "train/loss": 0.01} for u in range(1, 30)]
    [(_, drawing)] = curves.training_charts(lines, [{"update": 29, "val/baseline_loss/position_mean": 90.0}])
    assert "best trivial predictor" in drawing


def rows(metric: str = "auroc") -> list[Row]:
    return [
        Row(name, target, probe, pool, metric, value, value - 0.1, value + 0.1, 9)
        for target in ("drusen", "macro")
        for name, probe, pool, value in (
            ("majority", "constant", "none", 0.5),
            ("untrained", "linear", "mean", 0.6),
            ("ours", "linear", "mean", 0.7),
            ("ours", "knn", "mean", 0.95),
        )
    ]


def test_the_shown_results_are_of_the_planned_comparison_not_of_the_best() -> None:
    paired = ProbePaired(probe="linear", pool="mean", metric="auroc")
    groups = forest.forest(forest.planned_results(rows(), paired))
    assert [group.target for group in groups] == ["macro", "drusen"]
    assert [(row.result.name, row.result.value) for row in groups[0].rows] == [
        ("ours", 0.7),
        ("untrained", 0.6),
        ("majority", 0.5),
    ]
    assert len(forest.planned_results(rows(), None)) == len(rows())


def test_points_and_whiskers_lie_in_order_on_a_shared_scale() -> None:
    groups = forest.forest(forest.planned_results(rows(), ProbePaired(probe="linear", pool="mean", metric="auroc")))
    for group in groups:
        for row in group.rows:
            start, end = re.findall(r'whisker" d="M([\d.]+) [\d.]+v6m0 -3H([\d.]+)', row.drawing)[0]
            point = float(re.findall(r'point" d="M([\d.]+)', row.drawing)[0])
            assert float(start) < point < float(end)
    assert groups[0].rows[0].drawing == groups[1].rows[0].drawing


def test_a_figure_without_interval_or_value_draws_no_whisker() -> None:
    bare = [Row("ours", "x", metric="auroc")]
    row = forest.forest(bare)[0].rows[0]
    assert row.result.value is None
    assert "whisker" not in row.drawing
    assert "point" not in row.drawing


def test_a_small_store_shows_every_eye_and_a_large_store_one_per_device() -> None:
    rows = [{"volume_id": f"{n:02d}", "device": f"d{n % 2}", "pattern": "raster", "split": "train"} for n in range(21)]
    few, many = pd.DataFrame(rows[:20]), pd.DataFrame(rows)
    assert len(examples.all_if_few(few)) == 20
    assert [entry.volume_id for entry in examples.all_if_few(many)] == ["00", "01"]
