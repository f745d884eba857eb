"""The networks: pure modules, no data, no training.

They take patches of selected tokens with their positions, and return token features, predictions and targets.
Shapes that do not fit raise ValueError; nothing here reads a file or a clock.
"""

from octjepa.model.encoder import Encoder
from octjepa.model.vjepa3d import VJEPA3D

__all__ = ["VJEPA3D", "Encoder"]
