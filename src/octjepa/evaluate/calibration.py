"""From held-out scores to a probe's setting and to calibrated class probabilities.

The setting with the least held-out loss is selected; the same held-out predictions balance the decision between the
classes, so that each class weighs the same. The test split is only predicted, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from octjepa.evaluate.survival import TASK, partial_log_likelihood
from octjepa.evaluate.targets import Target
from octjepa.metrics.scores import Predictions


@dataclass(frozen=True)
class ProbeFit:
    """Predictions on the test split, the selected setting, and how many fits stopped before they converged.

    attention: of a probe on tokens that attends to them: for volumes, by their position in the table, the share of each
        of their tokens in turn.
    """

    predictions: Predictions
    setting: float
    unconverged: int
    attention: Callable[[Int[np.ndarray, " n"]], Iterator[Float[np.ndarray, " k"]]] | None = None


def class_shares(target: Target) -> Float[np.ndarray, " classes"]:
    """The share of each class among the training volumes."""
    return np.bincount(target.values["train"], minlength=len(target.classes)) / len(target.values["train"])


def calibration_shares(target: Target) -> Float[np.ndarray, " classes"]:
    """The class shares of calibrated probabilities: those of the training volumes before people were drawn by class.

    A draw of fewer labels takes equally many people of each class, so its shares are not those of the test people
    (Elkan 2001, The foundations of cost-sensitive learning).
    """
    return np.array(target.undrawn_shares) if target.undrawn_shares else class_shares(target)


def class_weights(truth: Int[np.ndarray, " n"], classes: int) -> Float[np.ndarray, " classes"]:
    """Inverse frequency: every class weighs the same in total, a volume 1 on average; 0 where a class is absent."""
    counts = np.bincount(truth, minlength=classes)
    weights: np.ndarray = np.divide(len(truth), classes * counts, out=np.zeros(classes), where=counts > 0)
    return weights


def apply_logit_shift(
    scores: Float[np.ndarray, "n classes"], shift: Float[np.ndarray, " classes"]
) -> Float[np.ndarray, "n classes"]:
    """Class probabilities with `shift` added to their logarithms."""
    logits = np.log(np.clip(scores, 1e-12, 1)) + shift
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: np.ndarray = raised / raised.sum(axis=1, keepdims=True)
    return probabilities


def _balancing_shift(
    scores: Float[np.ndarray, "n classes"], weight: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " classes"]:
    """The shift of the class logits with the least weighted log loss: every class is then expected equally often.

    Newton's method; `weight` sums to 1 and gives every class the same share.
    """
    classes = scores.shape[1]
    shift = np.zeros(classes)
    for _ in range(25):
        probabilities = apply_logit_shift(scores, shift)
        expected = weight @ probabilities  # [classes]
        gradient = expected - 1 / classes
        curvature = np.diag(expected) - (probabilities * weight[:, None]).T @ probabilities
        step = np.linalg.solve(curvature + 1e-6 * np.eye(classes), gradient)
        shift -= np.clip(step, -1, 1)
        if np.abs(gradient).max() < 1e-8:
            break
    return shift - shift.mean()


def select_setting(
    target: Target, truth: np.ndarray, held_out: list[Float[np.ndarray, "n classes"]]
) -> tuple[int, Float[np.ndarray, " classes"]]:
    """Index of the setting with the least held-out loss (the first of equals), and its shift of the class logits.

    Loss: log loss in which every class weighs the same, after the shift; mean squared error in regression. The shift is
    needed because with more features than volumes, class weights leave every unseen volume on the side of the
    commoner class: an AUROC of 0.8 could come with a balanced accuracy of 0.5. Survival: minus the log partial
    likelihood.
    """
    if target.task == TASK:
        return int(np.argmax([partial_log_likelihood(truth, scores[:, 0]) for scores in held_out])), np.zeros(1)
    if not target.classes:
        return int(np.argmin([np.mean((truth - scores[:, 0]) ** 2) for scores in held_out])), np.zeros(1)
    counts = np.bincount(truth, minlength=len(target.classes))
    weight = 1 / (len(counts) * counts[truth])
    shifts = [_balancing_shift(scores, weight) for scores in held_out]
    correct = np.arange(len(truth)), truth
    losses = [
        -weight @ np.log(np.clip(apply_logit_shift(scores, shift)[correct], 1e-12, 1))
        for scores, shift in zip(held_out, shifts, strict=True)
    ]
    best = int(np.argmin(losses))
    return best, shifts[best]


def calibrated_predictions(
    target: Target, scores: Float[np.ndarray, "n classes"], shift: Float[np.ndarray, " classes"]
) -> Predictions:
    """Balanced class probabilities and, for calibration, the same at `calibration_shares` (Saerens et al. 2002)."""
    if not target.classes:
        return Predictions(target.values["test"], scores, scores)
    balanced = apply_logit_shift(scores, shift)
    return Predictions(target.values["test"], balanced, at_class_shares(balanced, calibration_shares(target)))


def at_class_shares(
    balanced: Float[np.ndarray, "n classes"], shares: Float[np.ndarray, " classes"]
) -> Float[np.ndarray, "n classes"]:
    """Balanced probabilities brought to a population with these class shares."""
    calibrated = balanced * shares
    probabilities: np.ndarray = calibrated / calibrated.sum(axis=1, keepdims=True)
    return probabilities
