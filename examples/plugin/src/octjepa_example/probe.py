"""A probe: classes by the nearest centroid of the training volumes."""

import numpy as np

from octjepa.errors import UsageError
from octjepa.evaluate.calibration import ProbeFit, calibrated_predictions, select_setting

TEMPERATURES = (0.1, 1.0, 10.0)


def nearest_centroid(space, target, selection, smoothing=0.0, seed=0):
    """Class probabilities by the distance to each class's mean; the temperature is selected on validation volumes.

    space: standardised features of train, val and test; target: labels as codes. Returns test predictions.
    """
    if not target.classes:
        raise UsageError(f"{target.name}: the probe centroid needs classes")
    if selection.by == "cv":
        raise UsageError(f"{target.name}: the probe centroid needs validation volumes")
    truth = target.values["train"]
    centroids = np.stack([space.train[truth == code].mean(axis=0) for code in range(len(target.classes))])

    def probabilities(features, temperature):
        distance = np.linalg.norm(features[:, None] - centroids, axis=2)  # [volumes, classes]
        scores = np.exp(-(distance - distance.min(axis=1, keepdims=True)) / temperature)
        return scores / scores.sum(axis=1, keepdims=True)

    held_out = [probabilities(space.val, temperature) for temperature in TEMPERATURES]
    best, shift = select_setting(target, target.values["val"], held_out)
    test = probabilities(space.test, TEMPERATURES[best])
    return ProbeFit(calibrated_predictions(target, test, shift), setting=TEMPERATURES[best], unconverged=0)
