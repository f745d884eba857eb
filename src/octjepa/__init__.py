"""octjepa: 3D foundation models of retinal OCT volumes, from reading scans to evaluation.

The public names below are imported on first use, so that `import octjepa` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octjepa.embed.sklearn_transformer import VolumeEmbedder
    from octjepa.encoders import load_encoder
    from octjepa.encoders.external import load_external
    from octjepa.encoders.hub import from_pretrained
    from octjepa.encoders.locate import open_encoder
    from octjepa.model import VJEPA3D
    from octjepa.read.reader import read_volume
    from octjepa.store import Store
    from octjepa.tasks.segmenter.inference import load_segmenter
    from octjepa.volume import OCTVolume

__version__ = "0.2.0"
__all__ = [
    "VJEPA3D",
    "OCTVolume",
    "Store",
    "VolumeEmbedder",
    "from_pretrained",
    "load_encoder",
    "load_external",
    "load_segmenter",
    "open_encoder",
    "read_volume",
]

_MODULES = {
    "VJEPA3D": "octjepa.model",
    "OCTVolume": "octjepa.volume",
    "Store": "octjepa.store",
    "VolumeEmbedder": "octjepa.embed.sklearn_transformer",
    "from_pretrained": "octjepa.encoders.hub",
    "load_encoder": "octjepa.encoders",
    "load_external": "octjepa.encoders.external",
    "load_segmenter": "octjepa.tasks.segmenter.inference",
    "open_encoder": "octjepa.encoders.locate",
    "read_volume": "octjepa.read.reader",
}


def __dir__() -> list[str]:
    """The public names, which are imported on first use, and the names of every module."""
    return sorted({name for name in globals() if name.startswith("__")} | {*__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'octjepa' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
