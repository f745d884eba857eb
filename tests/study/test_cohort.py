"""The study's cohort: made once, labels and truth where the volumes are, in every vendor's order of B-scans."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.study import cohort as module
from benchmarks.study.cohort import REGIONS, UNSEEN, Eyes, make_cohort
from benchmarks.study.plan import RECIPE

from octjepa.phantom import LESIONS
from octjepa.views import geometry


def test_a_cohort_is_made_once(cohort: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: json.loads((cohort / "made.json").read_text())[name] for name in ("people", "seed", "difficulty")}
    monkeypatch.setattr(module, "write_cohort", None)
    assert make_cohort(cohort.parent, given, RECIPE) == cohort
    with pytest.raises(TypeError):
        make_cohort(cohort.parent, {**given, "seed": 2}, RECIPE)


def test_a_cohort_that_was_killed_half_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"people": 1, "seed": 3, "difficulty": "plain"}
    write = module.write_cohort

    def killed(out: Path, *rest: object, **more: object) -> None:
        out.mkdir(parents=True)
        (out / "torn").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_cohort", killed)
    with pytest.raises(KeyboardInterrupt):
        make_cohort(tmp_path, given, RECIPE)
    monkeypatch.setattr(module, "write_cohort", write)
    assert len(Eyes.open(make_cohort(tmp_path, given, RECIPE)).ids) == 2


def test_truth_lies_on_the_retina_of_every_vendor(cohort: Path) -> None:
    eyes = Eyes.open(cohort)
    preprocessing = eyes.store.preprocessing
    shape, size = geometry.center_crop(preprocessing), preprocessing.image_size
    assert set(eyes.splits) == {"train", "val", "test"}
    worst = {}
    for place, volume_id in enumerate(eyes.ids):
        volume = eyes.store.read(volume_id)
        regions, lesions = eyes.coarse_truth(place)
        again = eyes.coarse_truth(place)  # from the file kept
        assert np.array_equal(regions, again[0])
        assert np.array_equal(lesions, again[1])
        assert set(np.unique(regions)) <= {*range(len(REGIONS)), UNSEEN}
        band = geometry.tissue_mask(volume.band, shape, volume.pixels.shape[1], size)[:, :, 1::4]
        known = (regions != UNSEEN).all(axis=1) & band.any(axis=1)
        below = (regions > 0).argmax(axis=1)
        errors = np.abs(below - band.argmax(axis=1))[known]
        worst.setdefault(eyes.devices[place], []).append(float(np.median(errors)))
        there = [bool(((lesions >> bit) & 1).any()) for bit in range(len(LESIONS))]
        assert not any(found and not label for found, label in zip(there, eyes.labels[place], strict=True))
        assert sum(there) >= sum(eyes.labels[place]) - 1  # one may lie outside the central view
    assert len(worst) == 4
    assert max(max(rows) for rows in worst.values()) <= 3, worst  # a membrane lifts the band a little


def test_the_fovea_is_where_the_retina_is_thinnest(cohort: Path) -> None:
    """Of healthy enough eyes; mirrored, reversed or not."""
    eyes = Eyes.open(cohort)
    tz, _, tx = eyes.store.preprocessing.target_spacing_mm
    errors = []
    for place in np.flatnonzero(~eyes.labels.any(axis=1)):
        regions, _ = eyes.coarse_truth(int(place))
        inner = np.isin(regions, (1, 2)).sum(axis=1).astype(float)
        inner[(regions == UNSEEN).any(axis=1)] = np.inf
        inner[[0, 1, -1, -2]], inner[:, [0, 1, -1, -2]] = np.inf, np.inf
        thin = np.array(np.nonzero(inner <= inner.min() + 2)).mean(axis=1)
        found = (thin[0] - (inner.shape[0] - 1) / 2) * tz, (thin[1] * 4 + 1.5 - (4 * inner.shape[1] - 1) / 2) * tx
        errors.append(np.hypot(*(np.array(found) - eyes.fovea_mm[place])))
    assert len(errors) >= 2
    assert np.median(errors) < 0.35
