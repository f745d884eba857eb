"""The tasks on invented eyes: features that hold the truth answer, noise does not, and too few are left out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from benchmarks.exam import lesion_tasks, measurement_tasks, questions
from benchmarks.exam.ceiling import lesions_ceiling
from benchmarks.exam.lesion_tasks import EyeProbe, decoys, eye_lesion, token_lesion
from benchmarks.exam.measurement_tasks import same_eye, severity, surfaces
from benchmarks.exam.reading import covariates
from benchmarks.exam.results import Finding, LeftOut
from benchmarks.exam.tokens import TokenTable

from examined_eyes import eye_table
from octjepa.errors import UsageError
from octjepa.phantom import LESIONS

TRAIN, TEST = 120, 200
COUNT = TRAIN + TEST
GRID = (2, 5, 2)
TOKENS = 20  # of an eye
COMMON, RARE_IN_TEST, RARE_IN_TRAIN = 0, 1, 2  # numbers of lesions


class Eyes:
    """What the tasks ask of a cohort: each lesion in half of the eyes."""

    truth_folder = Path()  # of each test

    def __init__(self, name: str = "main") -> None:
        self.name, self.ids = name, [f"v{number:03d}" for number in range(COUNT)]
        self.people = np.array([f"p{number:03d}" for number in range(COUNT)])
        self.splits = np.array(["train"] * TRAIN + ["test"] * TEST)
        self.lesions = np.random.default_rng(1).random((COUNT, len(LESIONS))) < 0.5
        self.columns: dict[str, np.ndarray] = {"decoy_member": np.arange(COUNT) % 2.0}
        pixels = np.zeros((2, 8, 8), np.uint8)
        self.store = SimpleNamespace(
            preprocessing=SimpleNamespace(image_size=pixels.shape),
            read=lambda _: SimpleNamespace(pixels=pixels, tissue_mean=0.0, tissue_std=1.0),
        )

    @property
    def table(self) -> pd.DataFrame:
        return eye_table(self.ids, self.people.tolist(), self.splits.tolist())

    @property
    def uses(self) -> Path:
        return self.truth_folder.parent.parent / "uses"

    def indices(self, split: str) -> np.ndarray:
        return np.flatnonzero(self.splits == split)

    def column(self, name: str) -> np.ndarray:
        return self.columns[name]


def thinned(eyes: Eyes) -> Eyes:
    """One lesion in too few test people, one in too few training people."""
    eyes.lesions[TRAIN + 10 :, RARE_IN_TEST] = False
    eyes.lesions[1:TRAIN, RARE_IN_TRAIN] = False
    return eyes


@pytest.fixture(autouse=True)
def _one_draw_and_few_resamples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(questions, "RESAMPLES", 30)
    monkeypatch.setattr(Eyes, "truth_folder", tmp_path / "main" / "truth")
    for module in (lesion_tasks, measurement_tasks):
        monkeypatch.setattr(module, "DRAWS", 1)
        monkeypatch.setattr(module, "LABELLED_PEOPLE", (10, 30))
    monkeypatch.setattr(lesion_tasks, "LABELLED_EYES", (5, 30))
    monkeypatch.setattr(lesion_tasks, "choose_strength", lambda *_: 1e-2)  # which has a test of its own


def token_features(eyes: Any, signal: float) -> tuple[TokenTable, Any]:
    """Two tokens of each lesion in the eyes that have it, and noise that knows them by `signal`."""
    rng = np.random.default_rng(2)
    positive = np.zeros((COUNT, TOKENS, len(LESIONS)), bool)
    for eye, lesion in np.argwhere(eyes.lesions):
        positive[eye, rng.permutation(TOKENS)[:2], lesion] = True
    positive = positive.reshape(-1, len(LESIONS))
    features = rng.normal(size=(len(positive), 8))
    features[:, : len(LESIONS)] += signal * positive
    index = np.tile(np.arange(TOKENS), COUNT)
    table = TokenTable(features, index, np.arange(COUNT + 1) * TOKENS, GRID, (4, 8, 8))
    return table, SimpleNamespace(positive=positive)


def eye_features(truth: np.ndarray, signal: float, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(COUNT, 8)) + signal * np.pad(truth, ((0, 0), (0, 3)))


def figures(found: list[Finding | LeftOut]) -> dict[tuple[str, int | None], float]:
    return {(one.metric, one.labels): one.estimate.value for one in found if isinstance(one, Finding)}


def reasons(found: list[Finding | LeftOut]) -> dict[tuple[str, int | None], str]:
    return {(one.metric, one.labels): one.reason for one in found if isinstance(one, LeftOut)}


def test_tokens_that_hold_the_truth_find_the_lesion_and_noise_finds_its_prevalence() -> None:
    eyes: Any = Eyes()
    known = figures(list(token_lesion(eyes, *token_features(eyes, 8.0))))
    assert set(known) == {
        (metric, count) for metric in ("token_ap", *(f"token_ap_{name}" for name in LESIONS)) for count in (5, 30)
    }
    assert known["token_ap", 30] > 0.97
    noise = figures(list(token_lesion(eyes, *token_features(eyes, 0.0))))
    _, truth = token_features(eyes, 0.0)
    prevalence = truth.positive[TRAIN * TOKENS :].mean()
    assert all(abs(value - prevalence) < 0.02 for value in noise.values())


@pytest.mark.slow
def test_eyes_that_hold_the_truth_are_classified_and_add_to_intensity_and_noise_does_neither() -> None:
    eyes: Any = Eyes()
    noise, truth = (EyeProbe(eyes, eye_features(eyes.lesions, signal)) for signal in (0.0, 6.0))
    found = list(eye_lesion(eyes, truth, noise))
    assert not reasons(found)
    known = figures(found)
    assert min(known["auroc", count] for count in (30, None)) > 0.98
    assert min(known["added_auroc", count] for count in (30, None)) > 0.4
    other = EyeProbe(eyes, eye_features(eyes.lesions, 0.0, seed=4))
    for (metric, _), value in figures(list(eye_lesion(eyes, other, noise))).items():
        expected = 0.0 if metric.startswith("added") else 0.5
        assert abs(value - expected) < (0.05 if metric in {"auroc", "added_auroc"} else 0.15)
    assert not [one for one in eye_lesion(eyes, noise, None) if one.task == "added_value"]


@pytest.mark.parametrize("count", [10, None])
def test_a_lesion_that_too_few_eyes_have_is_left_out_and_the_mean_of_all_with_it(count: int | None) -> None:
    eyes: Any = thinned(Eyes())
    probe = EyeProbe(eyes, eye_features(eyes.lesions, 6.0))
    found = list(eye_lesion(eyes, probe, probe))
    known, why = figures(found), reasons(found)
    assert (f"auroc_{LESIONS[COMMON]}", count) in known
    assert f"of {TEST} test people have it; 20 with it" in why[f"auroc_{LESIONS[RARE_IN_TEST]}", count]
    assert (
        f"of {TRAIN} training people have it; {count or 'all'} are to be labelled"
        in (why[f"auroc_{LESIONS[RARE_IN_TRAIN]}", count])
    )
    assert ("auroc", count) not in known
    both = f"{LESIONS[RARE_IN_TEST]}, {LESIONS[RARE_IN_TRAIN]}, left out here"
    assert why["auroc", count].endswith(both)
    assert why["added_auroc", count].endswith(both)


def test_tokens_of_a_lesion_that_too_few_eyes_have_are_left_out_and_the_mean_of_all_with_them() -> None:
    eyes: Any = thinned(Eyes())
    table, truth = token_features(eyes, 8.0)
    truth.positive[: TRAIN * TOKENS, 3] = False  # eyes have it, no token holds enough of it to learn from
    truth.positive[TRAIN * TOKENS :, 4] = False  # none that is tested does
    found = list(token_lesion(eyes, table, truth))
    known, why = figures(found), reasons(found)
    assert set(known) == {(f"token_ap_{LESIONS[COMMON]}", count) for count in (5, 30)}
    assert "test people have it" in why[f"token_ap_{LESIONS[RARE_IN_TEST]}", 5]
    assert "training people have it; 5 are to be" in why[f"token_ap_{LESIONS[RARE_IN_TRAIN]}", 5]
    assert "fewer than two tokens of the 5 labelled eyes" in why[f"token_ap_{LESIONS[3]}", 5]
    assert "no token of a test eye" in why[f"token_ap_{LESIONS[4]}", 5]
    assert LESIONS[4] in why["token_ap", 5]


def test_a_supervised_network_is_left_without_the_same_questions() -> None:
    eyes: Any = thinned(Eyes())
    found = list(lesions_ceiling(eyes, lambda views: views[:, 0, 0, :5], None))
    assert set(reasons(found)) == {(f"auroc_{LESIONS[RARE_IN_TEST]}", None), ("auroc", None)}
    assert len(figures(found)) == 4


def test_matched_pairs_are_classified_or_left_out() -> None:
    eyes: Any = Eyes("drusen_or_wave")
    truth = np.repeat(eyes.column("decoy_member")[:, None], 5, axis=1)
    assert figures(list(decoys(eyes, eye_features(truth, 6.0))))["auroc_drusen_or_wave", 30] > 0.98
    assert abs(figures(list(decoys(eyes, eye_features(truth, 0.0))))["auroc_drusen_or_wave", 30] - 0.5) < 0.15
    eyes.columns["decoy_member"][TRAIN + 10 :] = 0
    found = list(decoys(eyes, eye_features(truth, 6.0)))
    assert not figures(found)
    assert "5 of 200 test people have it" in reasons(found)["auroc_drusen_or_wave", 30]


def test_each_use_of_the_test_people_is_counted_before_they_are_predicted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    eyes: Any = Eyes("drusen_or_wave")
    truth = np.repeat(eyes.column("decoy_member")[:, None], 5, axis=1)
    for signal in (6.0, 0.0, 6.0):  # the third is the first one again
        list(decoys(eyes, eye_features(truth, signal)))
    assert not caplog.records  # many rows use the open people: no warning for each
    (ledger,) = eyes.uses.glob("*.jsonl")
    uses = [json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines()]
    assert [(use["command"], use["target"]) for use in uses] == [("exam decoys", "drusen_or_wave")] * 2

    def refuse(*_: Any) -> None:
        raise AssertionError("test people were predicted")

    monkeypatch.setattr(lesion_tasks, "fit_draws", refuse)
    ledger.write_text("damaged", encoding="utf-8")
    with pytest.raises(UsageError, match="is damaged, so the uses of this test set can no longer be counted"):
        list(decoys(eyes, eye_features(truth, 1.0)))


def test_a_person_in_two_splits_is_refused() -> None:
    eyes: Any = Eyes("drusen_or_wave")
    eyes.people[0] = eyes.people[-1]
    with pytest.raises(UsageError, match="leak: 1 of"):
        list(decoys(eyes, eye_features(np.zeros((COUNT, 5)), 0.0)))


def test_surfaces_from_fewer_eyes_than_are_to_be_labelled_are_left_out() -> None:
    eyes: Any = Eyes()
    eyes.splits[4:TRAIN] = "val"
    found = list(surfaces(eyes, SimpleNamespace()))  # type: ignore[arg-type]  # no table is needed
    assert set(reasons(found)) == {("error_um", 5), ("error_um", 30)}
    assert "there are 4 training and 200 test eyes; 30 are to be" in reasons(found)["error_um", 30]


def test_severity_is_read_from_features_that_hold_it_and_left_out_where_too_few_are_diseased() -> None:
    eyes: Any = Eyes()
    amount = np.random.default_rng(5).random(COUNT)
    names = ("intraretinal_fluid_mm3", "subretinal_fluid_mm3", "atrophy_mm2", "central_thickness_um")
    eyes.columns |= dict.fromkeys(names, amount)
    x = np.random.default_rng(6).normal(size=(COUNT, 8))
    noise = figures(list(severity(eyes, x)))
    x[:, 0] = amount * 10
    known = figures(list(severity(eyes, x)))
    assert min(value for (metric, _), value in known.items() if metric.startswith("r2")) > 0.9
    assert max(value for (metric, _), value in noise.items() if metric.startswith("r2")) < 0.2
    assert known["mae_atrophy_mm2", 30] < 0.3 * noise["mae_atrophy_mm2", 30]
    eyes.columns["atrophy_mm2"] = np.where(np.arange(COUNT) < TRAIN + 5, amount, 0)
    why = reasons(list(severity(eyes, x)))
    assert set(why) == {(f"{kind}_atrophy_mm2", 30) for kind in ("r2", "mae")}
    assert "5 test people have it" in why["r2_atrophy_mm2", 30]


def test_the_same_eye_is_found_by_features_of_its_own_and_left_out_where_nobody_came_back() -> None:
    eyes: Any = Eyes()
    again: Any = Eyes("second_visit")
    x = np.random.default_rng(7).normal(size=(COUNT, 16)).astype(np.float32)
    assert figures(list(same_eye(eyes, x, again, x[::1] + 0.01))) == {
        ("top_1", 0): 1.0,
        ("mean_reciprocal_rank", 0): 1.0,
    }
    other = np.random.default_rng(8).normal(size=(COUNT, 16)).astype(np.float32)
    assert figures(list(same_eye(eyes, x, again, other)))["top_1", 0] < 0.05
    again.people = np.array([f"q{number}" for number in range(COUNT)])
    assert "0 test people have come back" in reasons(list(same_eye(eyes, x, again, x)))["top_1", 0]


def test_covariates_are_age_and_one_column_of_each_site_group_and_device() -> None:
    pandas = pytest.importorskip("pandas")
    eyes: Any = Eyes()
    eyes.devices = np.array(["a", "b"] * (COUNT // 2))
    eyes.store.participants = pandas.DataFrame(
        {
            "person_id": eyes.people[::-1],
            "age": np.arange(COUNT)[::-1],
            "clinical_site": "UW",
            "study_group": ["healthy", "insulin"] * (COUNT // 2),
        }
    )
    x = covariates(eyes)
    assert x.shape == (COUNT, 1 + 1 + 2 + 2)
    assert x[70, 0] == pytest.approx(1.0)  # each person's own age, whatever the order
    assert (x[:, 1:].sum(axis=1) == 3).all()
