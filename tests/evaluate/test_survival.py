"""Survival targets: Cox's partial likelihood and Harrell's C against values by hand, and a planted risk found."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from invented_cohort import probe_with
from octjepa.embed.table import read_embeddings
from octjepa.errors import UsageError
from octjepa.evaluate.cases import person_labels
from octjepa.evaluate.labels import read_labels
from octjepa.evaluate.subgroups import parse_subgroups
from octjepa.evaluate.survival import CoxRegression, join_events, partial_log_likelihood
from octjepa.metrics.scores import Predictions, measure, metric_value

SIGNED = np.array([1.0, 2.0, -3.0, 4.0])  # events at 1, 2 and 4; one lost sight of at 3
RISK = np.array([0.5, -0.2, 0.1, 0.0])


def predictions(signed: np.ndarray, risk: np.ndarray) -> Predictions:
    return Predictions(signed, risk[:, None], risk[:, None])


def test_the_partial_likelihood_is_that_by_hand() -> None:
    share = np.exp(RISK)
    by_hand = math.log(share[0] / share.sum()) + math.log(share[1] / share[1:].sum()) + math.log(1.0)
    assert partial_log_likelihood(SIGNED, RISK) == pytest.approx(by_hand)
    shuffled = np.array([2, 0, 3, 1])
    assert partial_log_likelihood(SIGNED[shuffled], RISK[shuffled]) == pytest.approx(by_hand)
    # Breslow: of two events at one time both have both at risk.
    tied, risk = np.array([1.0, 1.0, -2.0]), np.array([0.3, 0.0, -0.3])
    total = np.exp(risk).sum()
    assert partial_log_likelihood(tied, risk) == pytest.approx(0.3 - 2 * math.log(total))


def test_one_feature_without_penalty_has_the_root_by_hand() -> None:
    # Events at 1 (x = 1) and 2 (x = 0), two lost sight of later (x = 1 and 0): the score is 1 - 2e/(2e + 2) - e/(e + 2)
    # with e = exp(w); its root is found here by bisection.
    features, signed = np.array([[1.0], [0.0], [1.0], [0.0]]), np.array([1.0, 2.0, -3.0, -4.0])

    def score(weight: float) -> float:
        e = math.exp(weight)
        return 1 - 2 * e / (2 * e + 2) - e / (e + 2)

    low, high = -5.0, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if score(middle) > 0 else (low, middle)
    fitted = CoxRegression().set_params(alpha=1e-10).fit(features, signed)
    assert fitted.coef == pytest.approx([low], abs=1e-6)


def test_the_penalised_fit_is_the_minimum() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 4))
    signed = np.round(rng.exponential(1, 60) + 0.05, 1) * rng.choice([-1, 1], 60)  # with equal times
    fitted = CoxRegression().set_params(alpha=2.0).fit(features, signed)

    def loss(weights: np.ndarray) -> float:
        return float(weights @ weights) - partial_log_likelihood(signed, features @ weights)

    assert fitted.coef is not None
    for axis in np.eye(4) * 1e-4:  # the slope in every direction is 0
        assert (loss(fitted.coef + axis) - loss(fitted.coef - axis)) / 2e-4 == pytest.approx(0, abs=1e-5)
    assert fitted.fit(features, signed).coef == pytest.approx(fitted.coef)


def test_concordance_is_that_by_hand() -> None:
    # Known pairs: 1 before 2, 3, 4; 2 before 3, 4. Risks say so in 1>2, 1>3, 1>4, of 2 in none.
    assert metric_value("concordance", predictions(SIGNED, RISK)) == pytest.approx(3 / 5)
    assert metric_value("concordance", predictions(SIGNED, np.zeros(4))) == 0.5
    assert metric_value("concordance", predictions(SIGNED, -np.abs(SIGNED))) == 1.0
    # An event and one lost sight of at the same time are a pair; two events at the same time are none.
    assert metric_value("concordance", predictions(np.array([2.0, -2.0]), np.array([1.0, 0.0]))) == 1.0
    assert math.isnan(metric_value("concordance", predictions(np.array([2.0, 2.0]), np.array([1.0, 0.0]))))


def test_weights_are_repeats() -> None:
    weights = np.array([[1.0], [0.0], [2.0], [3.0]])
    drawn = np.array([0, 2, 2, 3, 3, 3])
    expected = metric_value("concordance", predictions(SIGNED[drawn], RISK[drawn]))
    assert measure("concordance", predictions(SIGNED, RISK), weights)[0] == pytest.approx(expected)


@pytest.fixture
def files(
    cohort: Callable[..., tuple[pd.DataFrame, pd.DataFrame]], saved: Callable[..., tuple[Path, Path]]
) -> tuple[Path, Path]:
    """People whose lesion, which the encoder knows, brings the event twenty times sooner; follow-up ends at 3 years."""
    frame, labels = cohort(people=120, shares=(0.5, 0.0, 0.5), signal=6.0, dim=4)
    rng = np.random.default_rng(3)
    sick = labels.groupby("person_id")["lesion0"].transform("max").to_numpy()
    person = rng.exponential(1, 120).repeat(2) * np.where(sick == 1, 0.5, 10.0) + 0.01
    table = labels.assign(years=np.minimum(person, 3.0).round(3), converted=(person < 3).astype(int))
    return saved(frame, table)


def test_a_planted_risk_is_found_and_the_baselines_stand_beside_it(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octjepa.evaluate.linear_knn.ALPHA_GRID", (10.0, 0.1))
    table, labels = files
    result = probe_with(
        [read_embeddings(table)],
        labels,
        ["years"],
        task="survival",
        event="converted",
        probes=["linear"],
        pools=["mean"],
        bootstrap=200,
        level="person",
        subgroups=parse_subgroups("eye"),
    )
    rows = {row["name"]: row for row in result.rows}
    assert {row["metric"] for row in result.rows} == {"concordance"}
    assert rows["octjepa"]["low"] > 0.55 > rows["untrained"]["low"]
    assert rows["octjepa"]["n_people"] == 60
    assert rows["majority"]["value"] == 0.5
    assert {"histogram", "covariates"} <= set(rows)
    assert result.paired["metric"] == "concordance"
    assert result.paired["difference"] == pytest.approx(rows["octjepa"]["value"] - rows["untrained"]["value"])
    (target,) = result.targets
    assert target["task"] == "survival"
    assert 0 < target["events"]["test"] < target["counts"]["test"] == 60
    assert {choice["setting"] for choice in result.choices} <= {10.0, 0.1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "survival"}, "needs --task survival and --event"),
        ({"event": "converted"}, "needs --task survival and --event"),
        ({"task": "survival", "event": "converted", "probes": ["knn"]}, "only the linear probe takes survival"),
        ({"task": "survival", "event": "years", "probes": ["linear"]}, "an event is 1"),
    ],
)
def test_half_a_survival_task_is_refused(files: tuple[Path, Path], settings: dict, message: str) -> None:
    table, labels = files
    with pytest.raises(UsageError, match=message):
        probe_with([read_embeddings(table)], labels, ["years"], bootstrap=10, **settings)


def test_times_and_events_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "labels.tsv"
    path.write_text("person_id\teye\tyears\tseen\n1\tOD\t2\tyes\n1\tOS\t5\tno\n2\tOD\t3\t0\n2\tOS\t4\t0\n3\tOD\t1\t\n")
    labels = join_events(read_labels(path, ["years", "seen"]), ["years"], "seen")
    assert labels.values["years"] == {
        ("1", "OD"): "2.0",
        ("1", "OS"): "-5.0",
        ("2", "OD"): "-3.0",
        ("2", "OS"): "-4.0",
    }
    assert "years: 1 label is left out: a time and no seen" in labels.notes
    eyes = pd.DataFrame({"person_id": ["1", "1", "2", "2"], "eye": ["OD", "OS"] * 2, "split": "test"})
    people, _, notes = person_labels(labels, eyes, "years", "survival")
    assert people.values["years"] == {("1", ""): "2.0", ("2", ""): "-4.0"}  # the event; the longer follow-up
    assert "the earliest event is the person's" in notes[0]
    path.write_text("person_id\tyears\tseen\n1\t0\t1\n")
    with pytest.raises(UsageError, match="'0': a time to an event is a number above 0"):
        join_events(read_labels(path, ["years", "seen"]), ["years"], "seen")


# Remission times in weeks of 42 leukaemia patients (Freireich et al. 1963), the example of Cox (1972); minus: censored.
TREATED = [-6, 6, 6, 6, 7, -9, -10, 10, -11, 13, 16, -17, -19, -20, 22, 23, -25, -32, -32, -34, -35]
CONTROLS = [1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23]
REMISSION = np.array(TREATED + CONTROLS, dtype=float)
CONTROL = np.repeat([0.0, 1.0], 21)


def test_the_leukaemia_trial_has_the_figures_of_the_textbooks() -> None:
    """Of R's coxph and SAS's PHREG with Breslow's handling of equal times: 1.5092, -93.985, -86.380, 0.690."""
    fitted = CoxRegression().set_params(alpha=1e-9).fit(CONTROL[:, None], REMISSION)
    assert fitted.coef == pytest.approx([1.50919], abs=1e-5)
    assert partial_log_likelihood(REMISSION, np.zeros(42)) == pytest.approx(-93.98505, abs=1e-5)
    assert partial_log_likelihood(REMISSION, fitted.predict(CONTROL[:, None])) == pytest.approx(-86.37962, abs=1e-5)
    assert metric_value("concordance", predictions(REMISSION, CONTROL)) == pytest.approx(0.690, abs=5e-4)


def drawn_survival(people: int = 40, axes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Features and signed times with ties, a third of them censored."""
    rng = np.random.default_rng(5)
    features = rng.normal(size=(people, axes))
    times = np.round(rng.exponential(np.exp(-features[:, 0])), 1) + 0.1
    return features, times * np.where(rng.random(people) < 1 / 3, -1, 1)


def test_scipy_finds_the_same_minimum_of_the_likelihood_written_out() -> None:
    from scipy.optimize import minimize

    features, signed = drawn_survival()
    times = np.abs(signed)

    def loss(weights: np.ndarray) -> float:
        risk = features @ weights
        events = [risk[i] - math.log(np.exp(risk[times >= times[i]]).sum()) for i in np.flatnonzero(signed > 0)]
        return float(0.5 * weights @ weights - sum(events))

    found = minimize(loss, np.zeros(3), tol=1e-10).x
    assert CoxRegression().set_params(alpha=1.0).fit(features, signed).coef == pytest.approx(found, abs=1e-4)


@pytest.mark.filterwarnings("ignore")  # of lifelines on new versions of pandas
def test_lifelines_agrees_where_it_is_installed() -> None:
    lifelines = pytest.importorskip("lifelines")
    features, signed = drawn_survival()
    risk = features[:, 0]
    ours = metric_value("concordance", predictions(signed, risk))
    assert lifelines.utils.concordance_index(np.abs(signed), -risk, signed > 0) == pytest.approx(ours)
    # It handles ties as Efron, and penalises coefficients of features with a standard deviation of 1, divided by n.
    signed = signed * (1 + 1e-3 * np.arange(len(signed)))
    features = (features - features.mean(axis=0)) / features.std(axis=0, ddof=1)
    table = pd.DataFrame(features).add_prefix("axis").assign(time=np.abs(signed), event=signed > 0)
    for alpha in (0.0, 1.0):
        theirs = lifelines.CoxPHFitter(penalizer=alpha / len(signed)).fit(table, "time", "event")
        fitted = CoxRegression().set_params(alpha=max(alpha, 1e-9)).fit(features, signed)
        assert fitted.coef == pytest.approx(theirs.params_.to_numpy(), abs=1e-4)
        if not alpha:
            likelihood = partial_log_likelihood(signed, fitted.predict(features))
            assert likelihood == pytest.approx(theirs.log_likelihood_, abs=1e-6)


@pytest.mark.filterwarnings("ignore")  # as above
def test_scikit_survival_agrees_where_it_is_installed() -> None:
    linear_model = pytest.importorskip("sksurv.linear_model")
    from sksurv.metrics import concordance_index_censored

    features, signed = drawn_survival()
    times, happened, risk = np.abs(signed), signed > 0, features[:, 0]
    ours = metric_value("concordance", predictions(signed, risk))
    assert concordance_index_censored(happened, times, risk)[0] == pytest.approx(ours)
    table = np.array(list(zip(happened, times, strict=True)), dtype=[("event", bool), ("time", float)])
    theirs = linear_model.CoxPHSurvivalAnalysis(alpha=1.0, ties="breslow").fit(features, table)
    fitted = CoxRegression().set_params(alpha=1.0).fit(features, signed)
    assert fitted.coef == pytest.approx(theirs.coef_, abs=1e-4)
