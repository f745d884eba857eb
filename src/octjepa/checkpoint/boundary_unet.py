"""Reads the segmentation network of the package, or one that `octjepa segment adapt` wrote, with its calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from octjepa.checkpoint.tensor_file import check_weights, read_safetensors
from octjepa.errors import CheckpointError, OctjepaError, UsageError
from octjepa.model.boundary_unet import BoundaryUNet, NetworkSize
from octjepa.model.bscan_inference import Calibration
from octjepa.parsing import read_object

PACKAGED: Final = Path(__file__).parents[1] / "weights" / "segmenter"


def read_boundary_unet(folder: str | Path | None = None) -> tuple[BoundaryUNet, Calibration]:
    """The packaged network, or the network in `folder`.

    Loads `segmenter.safetensors` and `segmenter.json`. Raises OctjepaError if a file is missing or damaged, or holds
    NaN or a calibration of another network; UsageError if that is in `folder`.
    """
    error_class = OctjepaError if folder is None else UsageError
    folder = PACKAGED if folder is None else Path(folder)
    try:
        tensors, _ = read_safetensors(folder / "segmenter.safetensors")
        check_weights(tensors, str(folder))
        record = read_object(folder / "segmenter.json")
        network = BoundaryUNet(NetworkSize())
        network.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()})
        stored = record.get("calibration", {})
        stored = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        calibration = Calibration(**stored)
    except CheckpointError as error:
        raise error_class(str(error)) from None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise error_class(
            f"{folder} holds no segmentation network that can be read ({type(error).__name__}): expected "
            "segmenter.safetensors and segmenter.json as `octjepa segment adapt` writes them"
        ) from None
    return network, calibration
