"""V-JEPA's targets and predictor with another loss."""

import torch.nn.functional as F

from octjepa.objectives.jepa import VJEPA


class SmoothL1(VJEPA):
    """Squared error near the target, absolute error far from it, mean over hidden tokens and features."""

    trivial_loss = 0.425  # of a standard normal: always predicting zero

    def loss(self, predicted, target):
        """Both are `[rows, hidden tokens, features]`."""
        return F.smooth_l1_loss(predicted.float(), target.float())
