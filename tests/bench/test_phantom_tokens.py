"""Frozen features in phantoms and real eyes: resamples are paired, rows are retained, draws of labels count."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks import phantom_tasks, phantom_tokens, real_tokens
from benchmarks.exam.truth import OF_EIGHT
from benchmarks.performance import RECORDS
from benchmarks.phantom_tasks import look_alike_samples, own_depths
from benchmarks.phantom_tokens import PhantomCohort, RetainedRows, differences, measure_samples, r2, resampled, value_of
from benchmarks.real_bscans import merged
from benchmarks.surface_tokens import fine_unet
from sklearn.metrics import average_precision_score

import octjepa
from octjepa.encoders.pooling import TokenFeatures
from octjepa.errors import UsageError


def test_a_resample_has_the_average_precision_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    scores, truth, weight = rng.normal(size=300), rng.random(300) < 0.2, rng.integers(0, 4, size=300)
    order = np.argsort(-scores, kind="stable")
    found = phantom_tokens._weighted_precision(truth[order], weight[order])
    assert found == pytest.approx(average_precision_score(truth, scores, sample_weight=weight))
    assert np.isnan(phantom_tokens._weighted_precision(truth[order], np.where(truth[order], 0, weight[order])))


def test_the_networks_own_depths_are_those_of_the_nearest_token() -> None:
    recipe = fine_unet(octjepa.open_encoder("phantom-tiny")).recipe
    (d, h, w), height = recipe.grid, recipe.tokens.patch_size[1]
    depths = np.random.default_rng(4).uniform(10, h * height - 10, (8, d, w))
    index = np.setdiff1d(np.arange(d * h * w), np.arange(h) * w + 5)  # the first slice's column 5 has no token
    slices, rows, columns = np.unravel_index(index, recipe.grid)
    distance = ((rows + 0.5) * height - 0.5 - depths[:, slices, columns]).T / height
    features = np.concatenate([np.zeros((len(index), 3)), distance.clip(-8, 8)], axis=1).astype(np.float32)
    found = own_depths(TokenFeatures(features, index, recipe.grid, np.ones(len(index), np.float32)), recipe)
    assert np.isnan(found[:, 0, 5]).all()
    found[:, 0, 5] = depths[list(OF_EIGHT), 0, 5]
    np.testing.assert_allclose(found, depths[list(OF_EIGHT)], atol=1e-4)


def test_draws_of_labels_widen_the_interval() -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(size=200)
    good, bad = truth + rng.normal(size=200) * 0.1, truth + rng.normal(size=200) * 0.8
    one, both = (value_of(resampled([truth] * len(many), many, r2)) for many in ([good, good], [good, bad]))
    assert both.high - both.low > 4 * (one.high - one.low)
    assert both.value < one.value


def test_differences_are_paired_by_resample() -> None:
    rng = np.random.default_rng(2)
    shared = rng.normal(size=201)
    rows = {
        "phantom-unet": {"mean": shared + 0.3},
        "random_unet": {"mean": shared},
        "context": {"mean": rng.normal(size=201)},
        "random_init": {"mean": shared},
    }
    found = differences(rows)
    assert set(found) == {"phantom-unet less random_unet", "phantom-unet less context"}  # its own random weights only
    controls = {name: {"mean": shared} for name in ("control", "other")}
    assert {"phantom-unet less control", "control less other"} <= set(differences(rows | controls))
    paired, loose = found["phantom-unet less random_unet"]["mean"], found["phantom-unet less context"]["mean"]
    assert (paired.value, paired.low, paired.high) == (0.3, 0.3, 0.3)
    assert loose.high - loose.low > 2


def test_measures_are_learned_from_some_eyes_and_tested_on_others() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(80, 4)).astype(np.float32)
    values = x[:, 0] * 3 + 5
    found = measure_samples(x, values, np.arange(80), "area", 3)
    assert len(found) == phantom_tokens.RESAMPLES + 1
    assert found[0] > 0.9
    noise = measure_samples(x, rng.normal(size=80), np.arange(80), "noise", 3)
    assert noise[0] < 0.3  # it would be about 1 in the labelled eyes themselves
    with pytest.raises(ValueError, match="area: 20 eyes have it; 30 are labelled"):
        measure_samples(x, values, np.arange(20), "area", 3)


def test_look_alikes_are_distinguished_by_their_difference() -> None:
    rng = np.random.default_rng(4)
    member = np.tile([True, False], 40)
    signal = (member * 2.0 + rng.normal(size=80))[:, None].astype(np.float32)
    found = look_alike_samples(signal, member[:40], member[40:], "kind", 4)
    assert found[0] > 0.8
    nothing = look_alike_samples(rng.normal(size=(80, 3)).astype(np.float32), member[:40], member[40:], "kind", 4)
    assert abs(nothing[0] - 0.5) < 0.25
    with pytest.raises(ValueError, match="kind: fewer than 30 eyes to label"):
        look_alike_samples(signal, member[:10], member[40:], "kind", 4)


def _cohort() -> PhantomCohort:
    """Eyes of two tokens; the second holds drusen in every other eye."""

    def shares(number: int, index: np.ndarray) -> np.ndarray:
        held = np.zeros((len(index), 2), np.float32)
        held[1, 0], held[0, 1] = number % 2, number % 3 == 0
        return held

    return PhantomCohort("exam", ("drusen", "subretinal_fluid"), list(range(60)), shares, 40)  # type: ignore[arg-type]


def _featurise(volumes: list[int]) -> list[TokenFeatures]:
    number = volumes[0]
    features = np.array([[number % 3 == 0, 0.0, 0.1], [0.0, number % 2, 0.2]], np.float32)
    return [TokenFeatures(features, np.array([0, 1]), (1, 2, 1), np.ones(2, np.float32))]


def test_a_retained_row_is_not_measured_again(tmp_path: Path) -> None:
    retained, calls = RetainedRows(tmp_path), []

    def make() -> phantom_tokens.Featurise:
        calls.append("features")
        return _featurise  # type: ignore[return-value]

    options = argparse.Namespace(readings=["linear"], only=None, draws=2)
    encoder = octjepa.load_encoder("phantom-tiny")
    rows = {"context": make}

    def measure() -> None:
        phantom_tokens._measure("shifted", _cohort, rows, encoder, retained, options)

    measure()
    assert calls == ["features"]
    samples = retained.rows("shifted", "linear", 2)["context"]
    assert samples["drusen"][0] > 0.9
    assert set(samples) == {"drusen", "subretinal_fluid", "with_drusen", "without_drusen"}
    assert np.array_equal(samples["without_drusen"], samples["subretinal_fluid"], equal_nan=True)
    measure()
    assert calls == ["features"]
    options.draws = 3  # other draws are another measurement
    measure()
    assert calls == ["features", "features"]
    found = phantom_tokens.record(retained, 2)
    assert found["linear"]["shifted"]["values"]["context"]["drusen"]["value"] > 0.9  # type: ignore[index]
    assert "exam" not in found["linear"]  # type: ignore[operator]
    context, earlier = found["linear"]["shifted"]["values"]["context"], {"drusen": {"value": 0.1}}  # type: ignore[index]
    values = {"phantom-truth": earlier, "position": earlier, "context": earlier}
    less = {"phantom-truth less context": earlier, "phantom-truth less position": earlier}
    known = {"linear": {"shifted": {"values": values, "differences": less}}}
    again = phantom_tokens.record(retained, 2, known)["linear"]["shifted"]  # type: ignore[index]
    assert again["values"] == values | {"context": context}
    assert set(again["differences"]) == {"phantom-truth less position"}  # context has another value now


def test_rows_of_tasks_that_were_not_measured_again_stay_in_the_record(tmp_path: Path) -> None:
    retained = RetainedRows(tmp_path)
    retained.write(retained.file("surfaces", "context", "whole", 2), {"mean": np.array([7.0, 7.0, 7.0])})
    value = {"mean": {"value": 4.0, "low": 4.0, "high": 4.0}}
    known = {"surfaces": {"values": {"phantom-unet": value}, "differences": {}}, "look_alikes": {"values": {}}}
    found = phantom_tasks.record(retained, 2, known)
    surfaces = found["surfaces"]["values"]  # type: ignore[index]
    assert (surfaces["phantom-unet"], surfaces["context"]["mean"]["value"]) == (value, 7.0)


def test_random_weights_of_another_seed_are_others() -> None:
    encoder = octjepa.load_encoder("phantom-tiny")
    hashes = [real_tokens.random_copy(encoder, seed).weights_hash() for seed in (0, 1, 0)]
    assert hashes[0] == hashes[2] == encoder.untrained().weights_hash()
    assert hashes[0] != hashes[1]
    assert encoder.recipe.train.seed == 0


def test_real_rows_stay_and_random_weights_are_the_mean_over_seeds(tmp_path: Path) -> None:
    rows = {"phantom-unet": [0.9, 0.8, 0.9], "random_unet@0": [0.7, 0.6, 0.5], "random_unet@1": [0.9, 0.6, 0.7]}
    for name, values in rows.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"fluid_ap": values}), encoding="utf-8")
    found = real_tokens.record(*real_tokens.retained_rows(tmp_path))
    assert found["rows"]["random_unet"]["fluid_ap"]["eyes"] == (0.8, 0.6, 0.6)  # type: ignore[index]
    assert found["means_of_seeds"] == {"random_unet": {"fluid_ap": [0.6, 0.733]}}
    difference = found["differences"]["phantom-unet less random_unet"]["fluid_ap"]  # type: ignore[index]
    assert difference["mean"] == pytest.approx(0.2)
    assert difference["eyes"] == pytest.approx((0.1, 0.2, 0.3))


def test_some_rows_of_b_scans_are_measured_anew_and_the_others_stay() -> None:
    def results(frames: int, rows: dict[str, dict[str, float]]) -> dict[str, object]:
        part = {"cyst": {"rows": rows}}
        return {"frames": frames, "eyes": 2, "groups": 2, "refused": {}, "lesions": part, "diagnoses": part}

    before = results(9, {"a": {"ap": 1.0, "less_context": 0.5}, "b": {"ap": 2.0}})
    found = merged(results(9, {"a": {"ap": 3.0}}), before)
    assert found["lesions"]["cyst"]["rows"] == {"a": {"ap": 3.0, "less_context": 0.5}, "b": {"ap": 2.0}}
    with pytest.raises(UsageError, match="frames 9, these are 8: measure all rows"):
        merged(results(8, {}), before)


def test_differences_of_the_published_record_are_those_of_its_rows() -> None:
    found = json.loads((RECORDS / "real_tokens.json").read_text(encoding="utf-8"))
    for pair, metrics in found["differences"].items():
        row, baseline = (found["rows"][name] for name in pair.split(" less "))
        for metric, difference in metrics.items():
            assert difference["mean"] == pytest.approx(row[metric]["mean"] - baseline[metric]["mean"], abs=0.011), pair
