"""Fixtures for tests of the report and the viewer: a folder like the one `octjepa demo` writes.

It contains a store of drawn eyes, a checkpoint, a training journal and probe rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrow_encoder import OVERRIDES

DEVICES = ("heidelberg_spectralis", "topcon_maestro2", "zeiss_cirrus")
EVIL = "<script>alert('eye')</script>.dcm"


def drawn_eye(number: int, size: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(pixels, band): a dim vitreous, a bright band whose inner edge has a pit, a brighter line below it."""
    depth, height, width = size
    rng = np.random.default_rng(number)
    top = 50 + (12 * np.exp(-(((np.arange(width) - width / 2) / 12) ** 2))).astype(int)
    rows = np.arange(height)[None, :, None]
    inside = (rows >= top) & (rows < 100)
    pixels = np.where(inside, 120, 12) + np.where((rows >= 88) & (rows < 92), 90, 0) + rng.normal(0, 9, size)
    band = np.stack([np.broadcast_to(top, (depth, width)), np.full((depth, width), 100)]).astype(np.int16)
    band[:, :, :3] = -1
    return np.clip(pixels, 0, 255).astype(np.uint8), band


def row_of(number: int, split: str) -> dict[str, Any]:
    content = f"{number:064x}"[::-1]
    return {
        "volume_id": content[:16],
        "content_hash": content,
        "person_id": f"{1000 + number // 2}",
        "eye": "OD" if number % 2 else "OS",
        "laterality_source": "header",
        "device": DEVICES[number // 2 % 3],
        "protocol": "macula",
        "region": "Macula",
        "pattern": "raster",
        "sop_instance_uid": f"1.2.{number}",
        "source": EVIL if number == 0 else f"eyes/{number:02d}.dcm",
        "personal": "",
        "native_d": 24,
        "native_h": 184,
        "native_w": 160,
        "spacing_z_mm": 0.26,
        "spacing_y_mm": 0.0078,
        "spacing_x_mm": 0.04,
        "provenance_slice": "protocol",
        "provenance_depth": "shared",
        "provenance_column": "shared",
        "uncertain": "slice" if number == 1 else "",
        "notes": "frames_reversed;rescaled" if number == 2 else "",
        "mirrored": False,
        "tissue_mean": 120.0,
        "tissue_std": 25.0,
        "tissue_share": 0.3,
        "quality": 0.8,
        "split": split,
        "file": f"/private/place/eyes/{number:02d}.dcm",
        "file_size": 10,
        "file_mtime_ns": 1,
    }


REFUSED = [
    {
        "file": "/private/place/eyes/<b>bold</b>.dcm",
        "hash": "",
        "stage": "read",
        "reason": "truncated",
        "detail": "/private/place/eyes/bold.dcm ends after 17 bytes",
        "when": "2026-01-01T00:00:00+00:00",
    },
    {
        "file": "/private/place/eyes/sub/page.dcm",
        "hash": "",
        "stage": "read",
        "reason": "not_dicom",
        "detail": "an HTML page",
        "when": "2026-01-01T00:00:00+00:00",
    },
    {
        "file": "/private/place/eyes/twin.dcm",
        "hash": "",
        "stage": "store",
        "reason": "duplicate_content",
        "detail": "the same as 03.dcm",
        "when": "2026-01-01T00:00:00+00:00",
    },
]


def fill_store(path: Path) -> None:
    from octjepa.config import load_recipe
    from octjepa.files import replace_folder
    from octjepa.store import Store
    from octjepa.store.index import IndexEntry
    from octjepa.store.storage import stage_chunk
    from octjepa.volume import CanonicalVolume

    recipe = load_recipe("tiny_cpu")
    store = Store.create(path, recipe.preprocessing)
    size = recipe.preprocessing.stored_size
    for number in range(12):
        row = row_of(number, ("train", "val", "test")[number // 6 + (number // 2 == 5)])
        pixels, band = drawn_eye(number, size)
        shifts, frame_shifts = np.zeros((size[0], size[2]), np.int16), np.zeros((24, size[2]), np.int16)
        frame_mm = 0.26 * (np.arange(24) - 11.5)
        volume = CanonicalVolume(row["volume_id"], pixels, band, 120.0, 25.0, shifts, frame_shifts, frame_mm)
        replace_folder(stage_chunk(store.chunk_folder(row["volume_id"]), volume), store.chunk_folder(row["volume_id"]))
        store.add(IndexEntry(**row))
    for refusal in REFUSED:
        store.refuse(refusal)
    store.consolidate()


def fill_run(path: Path) -> None:
    """A run of two updates: the journal and run.json as the loop writes them, weights as they start."""
    import torch

    from octjepa.checkpoint import state
    from octjepa.config import load_recipe, science_hash, to_yaml
    from octjepa.model import VJEPA3D
    from octjepa.train.optimizer import build_optimizer

    recipe = load_recipe("tiny_cpu", ["train.max_updates=2", *OVERRIDES])
    path.mkdir()
    (path / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    about = {
        "name": recipe.name,
        "science_hash": science_hash(recipe),
        "data_hash": "d" * 64,
        "code_hash": "c" * 64,
        "volumes": 6,
        "versions": {"octjepa": "0.1.0"},
        "devices": {"device": "cpu"},
        "started": "2026-01-01T00:00:00+00:00",
        "store": "../store",
    }
    (path / "run.json").write_text(json.dumps(about), encoding="utf-8")
    lines: list[dict[str, float]] = [
        {
            "update": u,
            "train/loss": 1.0 / u,
            "train/cosine": 0.2 * u,
            "train/lr": 1e-3,
            "train/grad_norm": 0.3 * u,
            "train/ema_momentum": 0.99,
            "volumes_per_second": 20.0,
            "seconds": 1.0,
        }
        for u in (1, 2)
    ]
    lines.append(
        {
            "update": 2,
            "val/loss": 0.4,
            "val/cosine": 0.61,
            "val/rankme": 31.0,
            "val/baseline/constant": 0.3,
            "val/baseline/position_mean": 0.5,
            "val/baseline/copy_nearest": 0.4,
            "val/baseline_loss/constant": 0.8,
        }
    )
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    torch.manual_seed(0)
    model = VJEPA3D.from_recipe(recipe)
    tensors = state.snapshot(model, build_optimizer(model, recipe.train))
    state.save(path / "checkpoints", 2, tensors, state.Record(recipe, 0, ()))


def probe_of(low: float, high: float) -> dict[str, Any]:
    reading = {"probe": "linear", "pool": "mean_std_max", "metric": "auroc"}
    names = ("tiny_cpu", "untrained", "histogram", "majority", "covariates")
    rows = [
        {
            "name": name,
            "target": target,
            **reading,
            "pool": "mean_std_max" if number < 2 else "none",
            "value": 0.8 - 0.05 * number,
            "low": None if name == "majority" else 0.5,
            "high": 0.9,
            "n": 12,
        }
        for target in ("drusen", "macro")
        for number, name in enumerate(names)
    ]
    paired = {
        "name": "tiny_cpu",
        "target": "macro",
        **reading,
        "difference": (low + high) / 2,
        "low": low,
        "high": high,
    }
    return {"rows": rows, "paired": paired, "comparisons": [], "notes": ["drusen: 1 volume has no label"]}


def fill_tuned(path: Path, run: Path) -> None:
    """The encoder of `run` as if it had been tuned to drusen, with heads drawn by chance, and what it says of the two
    test volumes: one right, one wrong."""
    from dataclasses import asdict

    import pandas as pd
    import torch

    from octjepa.checkpoint.folder import write_folder
    from octjepa.checkpoint.state import MODEL_FILE
    from octjepa.checkpoint.weights import TUNED
    from octjepa.config import science_hash
    from octjepa.encoders import load_encoder
    from octjepa.tasks.finetune.folder import HEAD_FILE, HeadSpec
    from octjepa.tasks.finetune.network import TunedNetwork
    from octjepa.train.learner import host_weights

    encoder = load_encoder(run)
    network = TunedNetwork(encoder, [("binary", 2)])
    torch.manual_seed(3)
    torch.nn.init.normal_(network.heads[0].linear.weight, std=0.02)
    state = host_weights(network)
    own = {name: value for name, value in state.items() if not name.startswith("encoder.")}
    target = {f"target_{name}": value for name, value in state.items() if name.startswith("encoder.")}
    head = HeadSpec("drusen", "binary", ("no", "yes"), (0.0, 1.0), (0.0, 0.0), (0.5, 0.5))
    about = {
        "recipe": encoder.recipe.model_dump(mode="json"),
        "contract_hash": science_hash(encoder.recipe.preprocessing),
        "trained_on": [],
        TUNED: {"settings": {"level": "volume"}, "heads": [asdict(head)], "devices": []},
    }
    write_folder(path / TUNED, 2, {MODEL_FILE: target, HEAD_FILE: own}, about)
    rows = [row_of(number, "test") for number in (10, 11)]
    predictions = pd.DataFrame(
        {
            "level": level,
            "target": "drusen",
            "split": "test",
            "truth": truth,
            "predicted": "yes",
            "classes": ["no", "yes"],
            "scores": [0.25, 0.75],
            "volume_id": row["volume_id"] if level == "volume" else "",
        }
        for level in ("volume", "eye")
        for row, truth in zip(rows, ("yes", "no"), strict=True)
    )
    predictions.to_parquet(path / "predictions.parquet", index=False)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo folder, made once; tests that change it take `demo`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path_factory.mktemp("report") / "demo"
    root.mkdir()
    fill_store(root / "store")
    fill_run(root / "run")
    (root / "probe.json").write_text(json.dumps(probe_of(0.02, 0.08)), encoding="utf-8")
    table = pa.table({"person_id": ["1000", "1000"], "split": ["train", "train"]})
    metadata = {b"octjepa.dim": b"48", b"octjepa.encoder": b"tiny_cpu"}
    pq.write_table(table.replace_schema_metadata(metadata), root / "embeddings.parquet")
    return root


@pytest.fixture
def demo(made: Path, tmp_path: Path) -> Path:
    """A copy of the demo folder to change."""
    return Path(shutil.copytree(made, tmp_path / "demo"))


@pytest.fixture
def as_tuned(made: Path) -> Callable[[Path], None]:
    """Puts a tuned network and its predictions into the folder of a fine-tuning."""
    return lambda folder: fill_tuned(folder, made / "run")
