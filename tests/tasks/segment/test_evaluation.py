"""Means over classes: the truth says which, alike for every row and for both sides of a pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octjepa.canonical.native_mapping import NativeMap
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.comparisons import paired_difference
from octjepa.metrics.findings import Findings
from octjepa.recipe import Preprocessing
from octjepa.tasks.labels.label_files import LabelVolume
from octjepa.tasks.labels.layer_labels import LayerLabels
from octjepa.tasks.segment.evaluation import METRICS, HeadEstimates, ScanFigures, evaluate_scan, report_classes
from octjepa.tasks.segment.labelled_volumes import NativeLabels, whole_scan_preprocessing
from octjepa.tasks.thickness import SECTORS, ScanOrientation, scan_centre
from octjepa.volume import OCTVolume

PEOPLE = [str(number) for number in range(8)]
COMMON = [8.0, 10.0, 10.0]  # both, said, true of a class: Dice 0.8
NOTHING, FALSE = [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]
FAR_MM = 0.3


def row(*rare: list[float], common: list[float] = COMMON) -> list[ScanFigures]:
    """Eight scans that hold the class `common`; the first ones have these counts of a second class, the others none."""
    counts = [*rare, *[NOTHING] * (len(PEOPLE) - len(rare))]
    empty = np.zeros((2, 9))
    return [
        ScanFigures(
            np.array([common, of]),
            np.array([[FAR_MM, 1, 1], [FAR_MM if of[0] else np.nan, 1, 1]]),
            np.zeros((2, 1, 1), np.float32),
            empty,
            empty,
        )
        for of in counts
    ]


def scored(**rows: list[ScanFigures]) -> HeadEstimates:
    scores = HeadEstimates(PEOPLE, ("common", "rare"), [np.zeros(1, np.uint8)] * len(PEOPLE), Draws(PEOPLE, 400, 0))
    for name, evaluated in rows.items():
        scores.add(name, evaluated)
    return scores


def test_a_false_voxel_of_a_class_that_no_scan_holds_moves_no_mean_and_is_seen() -> None:
    scores = scored(none=row(), false=row(FALSE))
    means = [scores.estimates[name, "dice", "mean"] for name in ("none", "false")]
    assert [mean.value for mean in means] == pytest.approx([0.8, 0.8])
    assert np.allclose(means[0].samples, means[1].samples)
    assert scores.estimates["false", "dice", "rare"].measured().to_json() == {
        "value": 0,
        "low": None,
        "high": None,
        "n": 8,
        "n_people": 0,
    }
    result = Findings()
    report_classes("net", row(FALSE, FALSE), ("common", "rare"), PEOPLE, result)
    assert (result.faults, result.notes) == (
        [],
        ["rare: no test scan holds it, so the means leave it out; net predicts 2 mm3 of it"],
    )


def test_both_sides_of_a_pair_average_the_classes_that_the_resamples_truth_holds() -> None:
    """One says the rare class rightly in its one scan; the other says it nowhere there, and falsely in another."""
    scores = scored(finds=row([5.0, 5.0, 5.0]), misses=row([0.0, 0.0, 5.0], FALSE))
    finds, misses = (scores.estimates[name, "dice", "mean"] for name in ("finds", "misses"))
    drawn = scores.draws.counts[0] > 0
    assert finds.samples == pytest.approx(np.where(drawn, 0.9, 0.8))
    assert misses.samples == pytest.approx(np.where(drawn, 0.4, 0.8))
    pair = paired_difference(finds, misses)
    assert (pair.difference, pair.undefined) == (pytest.approx(0.5), 0)
    assert scores.estimates["misses", "hd95_mm", "common"].value == pytest.approx(FAR_MM)
    assert np.isnan(scores.estimates["misses", "hd95_mm", "mean"].value)  # missing a class shortens no distance
    assert scores.estimates["finds", "hd95_mm", "mean"].value == pytest.approx(FAR_MM)
    scales = {metric: estimate.scale for (_, metric, _), estimate in scores.estimates.items()}
    assert scales == {"dice": "share", **dict.fromkeys(METRICS[1:], "error")}  # so that mm and um read alike


def test_a_class_of_few_people_has_no_interval_and_is_a_fault() -> None:
    some = row([4.0, 5.0, 5.0], [2.0, 5.0, 5.0])
    rare = scored(some=some).estimates["some", "dice", "rare"]
    assert (rare.n_people, rare.interval().low) == (2, None)
    result = Findings()
    report_classes("net", some, ("common", "rare"), PEOPLE, result)
    assert [fault.kind for fault in result.faults] == ["rare_class"]
    assert result.faults[0].what.startswith("rare: 2 of 8 test people have it, fewer than the 6 that an interval")
    alone = Findings()
    report_classes("net", row([4.0, 5.0, 5.0], common=NOTHING), ("other", "rare"), PEOPLE, alone)
    assert alone.faults == []  # no other class is in the mean
    assert any("its results have none" in text for text in alone.notes)


def _uneven() -> tuple[NativeLabels, np.ndarray]:
    """A scan with dense B-scans at the fovea, a class that fills 30 rows, and the width of each B-scan."""
    outer_mm = np.arange(1.08, 2.77, 0.48)
    at_mm = np.concatenate([-outer_mm[::-1], np.arange(-10, 11) * 0.06, outer_mm])
    contract = Preprocessing()
    shape, spacing = (len(at_mm), 128, 512), (0.06, 0.0039, 0.0117)
    shifts = np.zeros((len(at_mm), contract.stored_size[2]), np.int16)
    native = NativeMap(shape, spacing, contract, shifts, at_mm, mirrored=False)
    codes = np.zeros(shape, np.uint8)
    codes[:, 30:60] = 1
    scan = ScanOrientation("OD", scan_centre(native.slice_mm, native.column_mm), "inferior")
    width = np.full(len(at_mm), 0.06)
    width[[10 - 10 + len(outer_mm), -1 - len(outer_mm)]] = 0.27
    width[: len(outer_mm)] = width[-len(outer_mm) :] = 0.48
    return NativeLabels(codes, native, scan, "scan", "positions"), width


def test_uneven_b_scans_are_evaluated_by_their_positions() -> None:
    truth, width = _uneven()
    stored = truth.native.preprocessing.stored_size
    scores = np.zeros((2, *stored), np.float32)
    scores[1] = 1
    found = evaluate_scan(scores, np.zeros(stored, np.uint8), truth)
    sectors = dict(zip(SECTORS, found.true_etdrs[0], strict=True))
    for ring in ("inner", "outer"):
        for side in ("superior", "inferior"):
            assert sectors[f"{ring}_{side}"] == pytest.approx(30 * 3.9, rel=1e-3)
    assert found.counts[0, 2] == pytest.approx(width.sum() * 512 * 0.0117 * 30 * 0.0039, rel=0.01)


def test_a_whole_scan_holds_its_outermost_b_scans() -> None:
    contract = Preprocessing()
    at_mm = np.concatenate([np.arange(0, 3, 0.48), 3 + np.arange(30) * 0.06, [5.5, 6.5]])
    pixels = np.zeros((len(at_mm), 128, 512), np.uint8)
    volume = OCTVolume(pixels, (0.06, 0.0039, 0.0117), {"slice": "positions"}, "", "", slice_positions_mm=at_mm)
    whole = whole_scan_preprocessing(contract, volume)
    covered_mm = whole.stored_size[0] * whole.target_spacing_mm[0]
    assert 6.5 <= covered_mm < 6.5 + 2 * whole.target_spacing_mm[0]
    assert whole.stored_size[2] == contract.stored_size[2]


def test_a_layer_that_was_not_graded_is_not_0_um_thick() -> None:
    truth, _ = _uneven()
    stored = truth.native.preprocessing.stored_size
    scores = np.zeros((2, *stored), np.float32)
    scores[1] = 1
    codes = truth.codes.copy()
    codes[:, 30:60, ::2] = 255
    codes[:, 61:, 1::8] = 255  # the layer itself was graded
    known = np.zeros((1, *codes.shape[::2]), bool)
    known[..., 1::8] = True
    found = evaluate_scan(scores, np.zeros(stored, np.uint8), replace(truth, codes=codes, known_layers=known))
    whole = evaluate_scan(scores, np.zeros(stored, np.uint8), truth)
    assert np.isnan(found.predicted_um[0, :, ::2]).all()
    assert np.isfinite(found.predicted_um[0, :, 1::2]).all()
    assert found.true_etdrs[0, 0] == pytest.approx(30 * 3.9, rel=1e-3)
    assert found.errors[0, 1] == pytest.approx(whole.errors[0, 1], rel=0.01)  # thickness_error_um


def test_a_layer_is_known_where_all_voxels_between_its_boundaries_are_labelled() -> None:
    rows = np.array([2, 5, 8, 10, 12, 14, 16, 18], np.float32)[:, None, None].repeat(4, 2)
    rows[1, 0, 0] = np.nan
    labels = LayerLabels(rows)
    codes = labels.codes((1, 24, 4))
    codes[0, 6, 1] = 255
    known = LabelVolume(codes, labels.names, boundaries_px=rows).known_layers(("rnfl", "gcl_ipl", "inl", "fluid"))
    assert known[:, 0].tolist() == [
        [False, True, True, True],
        [False, False, True, True],
        [True, True, True, True],
        [False, False, False, False],
    ]
