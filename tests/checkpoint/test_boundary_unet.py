"""The segmentation network of another person's folder: damaged weights and NaN are refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octjepa.checkpoint.boundary_unet import PACKAGED, read_boundary_unet
from octjepa.errors import UsageError


@pytest.fixture
def adapted(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PACKAGED, tmp_path / "adapted"))


@pytest.mark.parametrize("size", [0, 4, 5000])
def test_weights_that_were_cut_are_refused(adapted: Path, size: int) -> None:
    weights = adapted / "segmenter.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(UsageError, match=r"segmenter\.safetensors is damaged"):
        read_boundary_unet(adapted)


def test_weights_that_hold_nan_are_refused(adapted: Path) -> None:
    tensors = load_file(adapted / "segmenter.safetensors")
    name = next(name for name, value in tensors.items() if value.is_floating_point())
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, adapted / "segmenter.safetensors")
    with pytest.raises(UsageError, match="hold NaN"):
        read_boundary_unet(adapted)


@pytest.mark.parametrize(
    "changed",
    [
        {"fluid_threshold": float("nan")},
        {"boundary_temperature": [1.0, 1.0]},
        {"boundary_temperature": [0.0] * 8},
        {"class_temperature": "1"},
        {"adapt": 5.0},
        {"flip": "no"},
        [],
    ],
)
def test_a_calibration_of_wrong_values_is_refused(adapted: Path, changed: dict[str, object] | list[object]) -> None:
    record = json.loads((adapted / "segmenter.json").read_text())
    record["calibration"] = record["calibration"] | changed if isinstance(changed, dict) else changed
    (adapted / "segmenter.json").write_text(json.dumps(record))
    with pytest.raises(UsageError, match="holds no segmentation network that can be read"):
        read_boundary_unet(adapted)
