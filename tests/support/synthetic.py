"""Small canonical volumes and a store of them in memory, for tests that need shapes and keys, not files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from narrow_encoder import SIZE
from octjepa.config import PRETRAINING
from octjepa.recipe import Preprocessing, Recipe
from octjepa.store import Store
from octjepa.store.storage import DiskStorage
from octjepa.volume import CanonicalVolume

# Where the tests of training compute: conftest.py hides every accelerator unless OCTJEPA_TEST_DEVICE names one.
DEVICE = torch.device(os.environ.get("OCTJEPA_TEST_DEVICE", "cpu"))

TEST_SIZE = dict.fromkeys(SIZE)  # the preset's numbers


def small_recipe(**sections: dict) -> Recipe:
    """A recipe of a second: 8x64x64 voxels, 2x4x4 = 32 tokens of which 24 are used, a narrow encoder.

    A test that depends on the size of the encoder names it; `model=TEST_SIZE` is the preset `test`.
    """
    data = {
        "name": "small",
        "model": SIZE,
        "preprocessing": {"image_size": [8, 64, 64], "margin": [0, 4, 4], "target_spacing_mm": [0.4, 0.016, 0.1]},
        "tokens": {"patch_size": [4, 16, 16], "select": "tissue", "budget": 24},
        "train": {"max_updates": 4, "global_batch": 4, "base_lr": 1e-3, "precision": "fp32"},
        "validation": {"max_samples": 8},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    return PRETRAINING.read(data, "of the test")


def volume(preprocessing: Preprocessing, number: int = 0) -> CanonicalVolume:
    """Dark above, a bright band, grey below; texture and band height depend on `number`."""
    d, h, w = preprocessing.stored_size
    rng = np.random.default_rng(number)
    top = (h * 0.35 + 4 * np.sin(np.linspace(0, 3, w) + number))[None].repeat(d, 0)
    bottom = top + h * 0.35
    rows = np.arange(h)[None, :, None]
    inside = (rows >= top[:, None]) & (rows < bottom[:, None])
    grain = rng.integers(0, 40, size=(d, h, w))
    stripes = 30 * ((rows - top[:, None]) // 6 % 2)
    pixels = np.where(inside, 90 + stripes + grain, 10 + grain // 4)
    pixels = np.clip(pixels + 20 * (number % 3), 0, 255).astype(np.uint8)
    band = np.stack([top, bottom]).astype(np.int16)
    tissue = pixels[inside]
    noise = np.random.default_rng((number, 1)).integers(-9, 10, pixels.shape).astype(np.int8)
    return CanonicalVolume(
        volume_id=f"volume{number:04d}",
        pixels=pixels,
        band=band,
        tissue_mean=float(tissue.mean()),
        tissue_std=float(tissue.std()),
        shifts=np.zeros((d, w), dtype=np.int16),
        half_difference=noise,
    )


class MemoryStore(Store):
    """A store without files: as much of it as views, training and embedding ask for."""

    table = pd.DataFrame()
    participants = pd.DataFrame()
    quarantine: tuple = ()

    def __init__(self, preprocessing: Preprocessing, train: int = 12, val: int = 8) -> None:
        self.preprocessing = preprocessing
        self.path = Path("memory")
        self.storage = DiskStorage(self.path)
        self.volumes = {f"volume{n:04d}": volume(preprocessing, n) for n in range(train + val)}
        self.table = pd.DataFrame(
            {
                "volume_id": list(self.volumes),
                "content_hash": [f"hash-{name}" for name in self.volumes],
                "chunk_hash": [f"chunk-{name}" for name in self.volumes],
                "person_id": [f"{1000 + n}" for n in range(train + val)],
                "eye": "OD",
                "device": ["topcon_triton", "zeiss_cirrus"] * ((train + val) // 2),
                "pattern": "raster",
                "site": ["UW", "UW", "UAB"] * ((train + val) // 3) + ["UW"] * ((train + val) % 3),
                "region": "Macula",
                "format": "dicom",
                "visit": "",
                "native_d": 60,
                "spacing_z_mm": 0.12,
                "spacing_y_mm": 0.004,
                "spacing_x_mm": 0.012,
                "quality": 0.8,
                "notes": "",
                "uncertain": "",
                "file_key": [f"key-{name}" for name in self.volumes],
                "sop_instance_uid": "",
                "split": ["train"] * train + ["val"] * val,
            }
        )

    def read(self, volume_id: str, halves: bool = False) -> CanonicalVolume:
        return self.volumes[volume_id]
