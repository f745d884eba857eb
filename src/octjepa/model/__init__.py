"""The networks: pure modules, no data, no training.

Enter: patches of selected tokens and their positions. Leave: token features, predictions, targets.
Fails with ValueError on shapes that do not fit; nothing here reads a file or a clock.
"""

from octjepa.model.encoder import Encoder
from octjepa.model.vjepa3d import VJEPA3D, Prediction

__all__ = ["VJEPA3D", "Encoder", "Prediction"]
