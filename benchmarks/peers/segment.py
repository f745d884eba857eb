"""Segmentation of a scan against MONAI's U-Net of equal size, and against the surface finder of ingest.

Ours is `Segmenter.segment` on a scan in memory: preparation, the network on each B-scan and its mirror image, eight
boundaries, classes, and the ILM and Bruch's membrane of the surface finder. `monai`: a U-Net of MONAI with as many
weights (random, for its speed does not depend on them) on the same prepared B-scans once, and the class of every voxel.
`surface_finder`: only the ILM and Bruch's membrane, without a network.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from benchmarks.peers.alternating_runs import Comparison, rate
from benchmarks.peers.ingest import monai
from torch.nn import functional

import octjepa
from octjepa.distributed.precision import inference_autocast
from octjepa.model.bscan_inference import BATCH, prepared_bscans, stack_neighbours
from octjepa.phantom import write_cohort
from octjepa.phantom.cohort import CohortDesign, Size
from octjepa.tasks.segmenter.inference import load_segmenter, near_bscans_of, network_shape, without_fill
from octjepa.tasks.segmenter.outer_boundaries import outer_boundaries
from octjepa.volume import OCTVolume

BSCANS = 49
SIZE: Size = "full"
# Widths with which a U-Net of MONAI with one residual unit has about as many weights as the packaged network.
MONAI_WIDTHS: Final = (32, 64, 128, 256, 320)


def phantom_scan() -> OCTVolume:
    """The first `BSCANS` B-scans of a phantom scan of a Spectralis, 496 x 768 in full size."""
    with tempfile.TemporaryDirectory(prefix="octjepa-bench-") as name:
        folder = Path(name, "phantom")
        write_cohort(folder, 1, 41, ("heidelberg_spectralis",), SIZE, design=CohortDesign(eyes_per_person=1))
        volume = octjepa.read_volume(next(folder.rglob("*.dcm")))
    return replace(volume, pixels=volume.pixels[:BSCANS], slice_positions_mm=None, content_hash="")


def monai_unet() -> torch.nn.Module:
    """MONAI's U-Net with three B-scans as channels and the outputs of the packaged network."""
    network: torch.nn.Module = monai("networks.nets").UNet(
        spatial_dims=2,
        in_channels=3,
        out_channels=12,
        channels=MONAI_WIDTHS,
        strides=(2,) * 4,
        num_res_units=1,
        norm="batch",
    )
    return network.eval().to(memory_format=torch.channels_last)


def classes_by(network: torch.nn.Module, volume: OCTVolume) -> np.ndarray:
    """Class of every voxel `[D, H, W]` by a plain loop: prepared B-scans, network, upsampled logits, argmax."""
    near, shape = near_bscans_of(volume), network_shape(volume.shape[1:], volume.spacing_mm)
    images = prepared_bscans(volume.pixels, shape, without_fill)
    out = np.empty(volume.shape, np.uint8)
    with torch.inference_mode(), inference_autocast(torch.device("cpu")):
        for start in range(0, len(images), BATCH):
            index = np.arange(start, min(start + BATCH, len(images)))
            stacked = stack_neighbours(images, near, index).contiguous(memory_format=torch.channels_last)
            logits = network(stacked)[:, 8:, : shape[0], : shape[1]].float()
            native = functional.interpolate(logits, volume.shape[1:], mode="bilinear", align_corners=False)
            out[index] = native.argmax(1).to(torch.uint8).numpy()
    return out


@contextmanager
def compare_with_monai() -> Iterator[Comparison]:
    """The whole segmentation of a scan, and MONAI's network on it. Raises UsageError: MONAI is not installed."""
    peer = monai_unet()
    volume, ours = phantom_scan(), load_segmenter()
    setup = _setup(volume) | {
        "weights": [sum(p.numel() for p in network.parameters()) for network in (ours.network, peer)]
    }
    yield Comparison(
        rate(lambda: len(ours.segment(volume).classes) // len(volume.pixels)),
        rate(lambda: len(classes_by(peer, volume)) // len(volume.pixels)),
        setup,
    )


@contextmanager
def compare_with_surface_finder() -> Iterator[Comparison]:
    """The whole segmentation of a scan, and the two outer boundaries without a network."""
    volume, ours = phantom_scan(), load_segmenter()
    near = near_bscans_of(volume)
    yield Comparison(
        rate(lambda: len(ours.segment(volume).classes) // len(volume.pixels)),
        rate(lambda: len(outer_boundaries(volume, near)) // 2),
        _setup(volume),
    )


def _setup(volume: OCTVolume) -> dict[str, Any]:
    return {"shape": list(volume.shape), "threads": torch.get_num_threads()}
