"""Reads the segmentation network of the package, or one that `octjepa segment adapt` wrote, with its calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from safetensors.torch import load_file

from octjepa.errors import OctjepaError, UsageError
from octjepa.model.boundary_unet import BoundaryUNet, NetworkSize
from octjepa.model.bscan_inference import Calibration

PACKAGED: Final = Path(__file__).parents[1] / "weights" / "segmenter"


def read_boundary_unet(folder: str | Path | None = None) -> tuple[BoundaryUNet, Calibration]:
    """The packaged network, or the network in `folder`.

    Loads `segmenter.safetensors` and `segmenter.json`. Raises OctjepaError if a file is missing or damaged; UsageError
    if that is in `folder`.
    """
    error_class = OctjepaError if folder is None else UsageError
    folder = PACKAGED if folder is None else Path(folder)
    try:
        tensors = load_file(folder / "segmenter.safetensors")
        record = json.loads((folder / "segmenter.json").read_text())
        network = BoundaryUNet(NetworkSize())
        network.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()})
        stored = record.get("calibration", {})
        stored = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        calibration = Calibration(**stored)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
        raise error_class(
            f"{folder} holds no segmentation network that can be read ({type(error).__name__}): expected "
            "segmenter.safetensors and segmenter.json as `octjepa segment adapt` writes them"
        ) from None
    return network, calibration
