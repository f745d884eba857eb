"""Survival targets: a time and whether the event was seen at it, read by Cox regression with an L2 penalty.

A label is one signed number, the convention of XGBoost's Cox objective: the time where the event happened, minus the
time of last sight if it did not (censored). The model is the log partial likelihood of Cox (1972) with Breslow's
handling of equal times; the penalty is that of the linear probe of classes, so one grid of settings serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from octjepa.errors import UsageError, counted_are
from octjepa.evaluate.labels import LabelTable, numbers_of

TASK = "survival"
DEFAULT_PROBES = ("linear", "knn")  # of every other task
MIN_EVENTS = 2  # in train and in test
_YES, _NO = {"1", "1.0", "true", "yes"}, {"0", "0.0", "false", "no"}
_STEPS, _TOLERANCE = 50, 1e-9


def join_events(labels: LabelTable, times: Sequence[str], event: str) -> LabelTable:
    """The columns `times` of `labels` as signed times, by the column `event` (1 or 0, yes or no).

    A person without a time or an event has no label. Raises UsageError: a time that is not above 0, an event that is
    neither yes nor no.
    """
    labels.require_no_visits("a time to an event needs one row per person and eye")
    happened = {key: text.lower() for key, text in labels.values[event].items()}
    if wrong := sorted(set(happened.values()) - _YES - _NO):
        raise UsageError(f"{event} holds {wrong[0]!r}: an event is 1 (it happened) or 0 (it was not seen until then)")
    values = dict(labels.values)
    for name in times:
        signed: dict[tuple[str, str], str] = {}
        for key, text in labels.values[name].items():
            number = numbers_of([text])
            if number is None or number[0] <= 0:
                raise UsageError(f"{name} holds {text!r}: a time to an event is a number above 0")
            if key in happened:
                signed[key] = repr(float(number[0]) if happened[key] in _YES else -float(number[0]))
        values[name] = signed
    notes = tuple(
        f"{name}: {counted_are(missing, 'label')} left out: a time and no {event}"
        for name in times
        if (missing := len(set(labels.values[name]) - set(happened)))
    )
    return replace(labels, values=values, notes=(*labels.notes, *notes))


def default_probes(task: str) -> tuple[str, ...]:
    """The probes of `task` if none is named."""
    return ("linear",) if task == TASK else DEFAULT_PROBES


def check_survival(task: str, event: str | None, probes: Sequence[str]) -> None:
    """Raises UsageError: a survival task without an event or the other way round, or another probe than linear."""
    if (task == TASK) != (event is not None):
        raise UsageError(
            "a survival task needs --task survival and --event COLUMN, and its targets are times: give both options or "
            "neither"
        )
    if task == TASK and tuple(probes) != ("linear",):
        raise UsageError("only the linear probe takes survival, as Cox regression: --probe linear")


def check_events(target: str, values: dict[str, np.ndarray]) -> None:
    """Raises UsageError where train or test holds too few events to learn from or to measure."""
    events = {split: int((values[split] > 0).sum()) for split in ("train", "test")}
    if min(events.values()) < MIN_EVENTS:
        raise UsageError(
            f"{target}: {events['train']} events in train and {events['test']} in test, at least {MIN_EVENTS} of each "
            "are needed"
        )


def partial_log_likelihood(signed: Float[np.ndarray, " n"], risk: Float[np.ndarray, " n"]) -> float:
    """The log partial likelihood of log risks: over the events, risk minus the log of the summed risk still at it."""
    order, last = _risk_sets(signed)
    risk = risk[order] - risk.max()
    at_risk = np.cumsum(np.exp(risk))[last]
    events = signed[order] > 0
    return float((risk[events] - np.log(at_risk[events])).sum())


def _risk_sets(signed: Float[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """The order of falling time, and for each of it the position of the last that has its time.

    All up to that position are at risk when its event happens; of equal times all are.
    """
    order = np.argsort(-np.abs(signed), kind="stable")
    times = np.abs(signed)[order]
    return order, np.searchsorted(-times, -times, side="right") - 1


class CoxRegression:
    """Cox regression with the penalty alpha / 2 |w|^2, in the form of scikit-learn's estimators; fits start warm."""

    def __init__(self) -> None:
        self.alpha = 1.0
        self.coef: Float[np.ndarray, " axes"] | None = None

    def set_params(self, alpha: float) -> CoxRegression:
        """Sets the strength of the penalty."""
        self.alpha = alpha
        return self

    def fit(
        self,
        features: Float[np.ndarray, "n axes"],
        signed: Float[np.ndarray, " n"],
        sample_weight: None = None,
    ) -> CoxRegression:
        """Newton's method with halved steps. Warns with ConvergenceWarning if it does not end."""
        order, last = _risk_sets(signed)
        ordered, events = features[order], signed[order] > 0
        weights = self.coef if self.coef is not None else np.zeros(features.shape[1])
        loss = self._loss(features, signed, weights)
        for _ in range(_STEPS):
            gradient, curvature = self._derivatives(ordered, events, last, weights)
            step = np.linalg.solve(curvature, gradient)
            scale = 1.0
            while (lower := self._loss(features, signed, weights - scale * step)) > loss and scale > 1e-6:
                scale /= 2
            if loss - lower < _TOLERANCE * max(1.0, abs(loss)):
                self.coef = weights if lower > loss else weights - scale * step
                return self
            weights, loss = weights - scale * step, lower
        self._warn()
        self.coef = weights
        return self

    def predict(self, features: Float[np.ndarray, "n axes"]) -> Float[np.ndarray, " n"]:
        """The log risk of every volume, up to a constant: larger is earlier."""
        return np.asarray(features @ self.coef)

    def _loss(self, features: np.ndarray, signed: np.ndarray, weights: np.ndarray) -> float:
        penalty = self.alpha / 2 * float(weights @ weights)
        return penalty - partial_log_likelihood(signed, features @ weights)

    def _derivatives(
        self, features: np.ndarray, events: np.ndarray, last: np.ndarray, weights: np.ndarray
    ) -> tuple[Float[np.ndarray, " axes"], Float[np.ndarray, "axes axes"]]:
        """Gradient and curvature of the loss; `features` in the order of falling time."""
        risk = features @ weights
        share = np.exp(risk - risk.max())
        total = np.cumsum(share)[last][events]  # of all at risk, for every event
        mean = np.cumsum(share[:, None] * features, axis=0)[last][events] / total[:, None]  # [events, axes]
        gradient = self.alpha * weights - (features[events] - mean).sum(axis=0)
        # How often each volume is at risk, weighed by its share then: one product instead of one for every event.
        at_risk = np.zeros(len(share))
        np.add.at(at_risk, last[events], 1 / total)
        often = share * np.cumsum(at_risk[::-1])[::-1]
        curvature = (features * often[:, None]).T @ features - mean.T @ mean
        return gradient, curvature + self.alpha * np.eye(len(weights))

    def _warn(self) -> None:
        import warnings

        from sklearn.exceptions import ConvergenceWarning

        warnings.warn(f"Cox regression did not converge in {_STEPS} steps", ConvergenceWarning, stacklevel=3)
