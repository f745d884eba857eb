"""The two probes do what scikit-learn's own do, choose without the test people, and treat classes alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsClassifier

from octjepa.evaluate import calibration, linear_knn
from octjepa.evaluate import features as probe_features
from octjepa.evaluate.leaderboard.selection import selection_note
from octjepa.evaluate.targets import Target
from octjepa.metrics.scores import metric_value


def _problem(
    classes: int = 2, people: int = 80, features: int = 120, seed: int = 0
) -> tuple[np.ndarray, Target, np.ndarray]:
    """Features [volumes, features], the target, person ids; 2 volumes a person; split 60 / 15 / 25 %."""
    rng = np.random.default_rng(seed)
    volumes = 2 * people
    values = np.minimum(rng.integers(0, classes + 1, volumes), classes - 1)  # the last class is twice as common
    x = rng.normal(size=(volumes, features)) + 1.2 * np.eye(features)[values]
    person_ids = np.array([f"{index // 2:03d}" for index in range(volumes)])
    cuts = [0, 2 * int(0.6 * people), 2 * int(0.75 * people), volumes]
    rows = {name: np.arange(cuts[i], cuts[i + 1]) for i, name in enumerate(("train", "val", "test"))}
    names = tuple(str(code) for code in range(classes))
    split_values = {name: values[index] for name, index in rows.items()}
    kind = "binary" if classes == 2 else "multiclass"
    return x, Target("t", kind, rows, split_values, names, "h", ()), person_ids


def test_rotation_changes_no_prediction() -> None:
    x, target, _ = _problem()
    space = probe_features.feature_space(x, target)
    assert space.train.shape[1] < len(target.indices["train"])  # 96 volumes of 120 features need at most 95 axes
    train, test = x[target.indices["train"]], x[target.indices["test"]]
    scale = train.std(axis=0) * np.sqrt(120)
    centred, unseen = (train - train.mean(axis=0)) / scale, (test - train.mean(axis=0)) / scale
    assert np.allclose(space.train @ space.train.T, centred @ centred.T)
    assert np.allclose(np.linalg.norm(centred, axis=1).mean(), 1, atol=0.1)
    truth = target.values["train"]
    whole = LogisticRegression(C=10, tol=1e-10, max_iter=5000, class_weight="balanced").fit(centred, truth)
    turned = LogisticRegression(C=10, tol=1e-10, max_iter=5000, class_weight="balanced").fit(space.train, truth)
    assert np.allclose(whole.predict_proba(unseen), turned.predict_proba(space.test), atol=1e-4)


def test_rounding_of_a_constant_feature_does_not_count() -> None:
    x, target, _ = _problem(features=30)
    rounding = 1 + 1e-7 * np.random.default_rng(1).integers(-1, 2, size=(len(x), 20))  # as a sum in fp32 rounds
    with_constants = probe_features.feature_space(np.concatenate([x, rounding], axis=1), target)
    alone = probe_features.feature_space(x, target)
    assert np.array_equal(with_constants.train, alone.train)
    assert np.array_equal(with_constants.test, alone.test)


@pytest.mark.parametrize("classes", [2, 3])
def test_linear_is_the_chosen_logistic_regression(classes: int) -> None:
    x, target, person_ids = _problem(classes, features=30)
    space = probe_features.feature_space(x, target)
    probed = linear_knn.fit_linear(space, target, probe_features.plan_selection(target, person_ids, 0))
    assert probed.setting in linear_knn.C_GRID
    own = LogisticRegression(C=probed.setting, class_weight="balanced", tol=1e-8, max_iter=5000)
    own.fit(space.train, target.values["train"])
    # The chosen shift adds one number per class to the logits, the same for every volume.
    added = np.log(probed.predictions.scores) - own.predict_log_proba(space.test)
    added -= added.mean(axis=1, keepdims=True)
    assert np.ptp(added, axis=0).max() < 2e-3
    assert metric_value("balanced_accuracy", probed.predictions) > 1 / classes + 0.08


@pytest.mark.parametrize("probe", [linear_knn.fit_linear, linear_knn.fit_knn])
def test_a_rare_class_is_decided_for_as_often_as_it_is_there(probe: Callable[..., calibration.ProbeFit]) -> None:
    rng = np.random.default_rng(4)
    x, target, person_ids = _problem(people=200, features=400)
    rare = (rng.random(400) < 0.15).astype(int)
    x += 2.5 * np.outer(rare, np.eye(400)[5])
    values = {split: rare[rows] for split, rows in target.indices.items()}
    target = Target("rare", "binary", target.indices, values, ("0", "1"), "h", ())
    predicted = probe(
        probe_features.feature_space(x, target), target, probe_features.plan_selection(target, person_ids, 0)
    ).predictions
    assert roc_auc_score(predicted.truth, predicted.scores[:, 1]) > 0.6
    # Without the shift the linear probe says "0" of nearly every unseen volume.
    assert 0.2 < predicted.predicted_classes().mean() < 0.7
    assert predicted.calibrated[:, 1].mean() == pytest.approx(0.15, abs=0.06)


def test_calibrated_probabilities_carry_the_training_shares() -> None:
    x, target, person_ids = _problem(people=400, features=6)
    probed = linear_knn.fit_linear(
        probe_features.feature_space(x, target), target, probe_features.plan_selection(target, person_ids, 0)
    )
    share = target.values["train"].mean()
    assert share > 0.6
    assert probed.predictions.calibrated[:, 1].mean() == pytest.approx(share, abs=0.05)
    assert probed.predictions.scores[:, 1].mean() < share - 0.03
    assert np.allclose(probed.predictions.calibrated.sum(axis=1), 1)


def test_knn_orders_test_volumes_as_scikit_learn_does() -> None:
    x, target, person_ids = _problem()
    space = probe_features.feature_space(x, target)
    probed = linear_knn.fit_knn(space, target, probe_features.plan_selection(target, person_ids, 0))
    own = KNeighborsClassifier(int(probed.setting), metric="cosine", algorithm="brute")
    own.fit(space.train, target.values["train"])
    share = own.predict_proba(space.test)[:, 1]
    assert roc_auc_score(target.values["test"], probed.predictions.scores[:, 1]) == pytest.approx(
        roc_auc_score(target.values["test"], share)
    )
    assert (probed.predictions.scores > 0).all()


def test_knn_neighbours_in_cross_validation_are_other_people() -> None:
    x, target, person_ids = _problem()
    folds = probe_features.plan_selection(target, person_ids, 0).folds
    order = probe_features.feature_space(x, target).neighbours("train", folds)
    train_people = person_ids[target.indices["train"]]
    limit = len(folds) - np.bincount(folds).max()
    assert not any((train_people[order[row, :limit]] == train_people[row]).any() for row in range(len(order)))


def test_regression_is_the_chosen_ridge() -> None:
    x, target, person_ids = _problem(people=120)
    quantity = 50 + 8 * x[:, 0]
    values = {split: quantity[rows] for split, rows in target.indices.items()}
    target = Target("age", "regression", target.indices, values, (), "h", ())
    space, how = probe_features.feature_space(x, target), probe_features.plan_selection(target, person_ids, 0)
    for probe in (linear_knn.fit_linear, linear_knn.fit_knn):
        probed = probe(space, target, how)
        error = np.abs(probed.predictions.truth - probed.predictions.scores[:, 0]).mean()
        assert error < np.abs(values["test"] - values["train"].mean()).mean()
    probed = linear_knn.fit_linear(space, target, how)
    own = Ridge(alpha=probed.setting).fit(space.train, values["train"])
    assert np.allclose(probed.predictions.scores[:, 0], own.predict(space.test))


def test_choosing_keeps_people_together_and_uses_val_only_if_it_is_large() -> None:
    _, target, person_ids = _problem()
    how = probe_features.plan_selection(target, person_ids, 0)
    assert how.by == "cv"
    people = person_ids[target.indices["train"]]
    assert set(np.unique(how.folds)) == set(range(probe_features.FOLDS))
    assert all(len(set(how.folds[people == person])) == 1 for person in people)
    _, large, ids = _problem(people=400)
    assert probe_features.plan_selection(large, ids, 0).by == "val"
    x, tiny, ids = _problem(people=12)
    tiny.values["train"][:] = 0
    tiny.values["train"][0] = 1  # one person with the class: it cannot be in and out of a fold
    assert probe_features.plan_selection(tiny, ids, 0).by == "fixed"
    assert (
        linear_knn.fit_linear(
            probe_features.feature_space(x, tiny), tiny, probe_features.plan_selection(tiny, ids, 0)
        ).setting
        == linear_knn.C_GRID[3]
    )


@pytest.mark.parametrize("people", [80, 400])
def test_neither_test_features_nor_test_labels_reach_the_choice(people: int) -> None:
    x, target, person_ids = _problem(people=people)
    other = x.copy()
    other[target.indices["test"]] = 1e3
    values = {**target.values, "test": 1 - target.values["test"]}
    flipped = Target("t", "binary", target.indices, values, target.classes, "h", ())
    for probe in (linear_knn.fit_linear, linear_knn.fit_knn):
        how = probe_features.plan_selection(target, person_ids, 0)
        first = probe(probe_features.feature_space(x, target), target, how)
        second = probe(
            probe_features.feature_space(other, flipped), flipped, probe_features.plan_selection(flipped, person_ids, 0)
        )
        assert first.setting == second.setting


def test_features_that_never_vary_give_the_prior() -> None:
    x, target, person_ids = _problem()
    x[:] = 3.0
    space = probe_features.feature_space(x, target)
    for probe in (linear_knn.fit_linear, linear_knn.fit_knn):
        scores = probe(space, target, probe_features.plan_selection(target, person_ids, 0)).predictions.scores
        assert np.ptp(scores[:, 1]) == 0


@pytest.mark.parametrize(("events", "by"), [(0, "cv"), (40, "val")])
def test_a_validation_split_without_events_chooses_no_survival_setting(events: int, by: str) -> None:
    _, target, person_ids = _problem(people=400)
    times = {split: np.full(len(rows), -2.0) for split, rows in target.indices.items()}
    times["val"][: 2 * events] = 1.0
    times["train"][::3] = 1.0
    survival = Target("death", "survival", target.indices, times, (), "h", ())
    assert probe_features.plan_selection(survival, person_ids, 0).by == by


def test_equal_validation_values_choose_nothing() -> None:
    _, target, _ = _problem()
    values = {split: rows.astype(float) for split, rows in target.indices.items()} | {"val": np.zeros(24)}
    age = Target("age", "regression", target.indices, values, (), "h", ())
    assert "do not hold two different values" in selection_note(age, np.arange(160).astype(str))
