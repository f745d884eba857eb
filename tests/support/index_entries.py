"""Stores of index rows without pixels: as much as splits, criteria, flows and leak checks look at."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octjepa.recipe import Preprocessing
from octjepa.store.folder import Store
from octjepa.store.index import IndexEntry


def index_entry(number: int, **fields: Any) -> dict[str, Any]:
    """A whole row of volumes.parquet; `said` replaces what it says. Two rows make a person of two eyes."""
    content = f"{number:016x}"[::-1] + "0" * 48
    return {
        "volume_id": content[:16],
        "content_hash": content,
        "person_id": f"{1001 + number // 2}",
        "eye": ("OD", "OS")[number % 2],
        "laterality_source": "header",
        "device": "topcon_triton",
        "protocol": "",
        "region": "Macula",
        "pattern": "raster",
        "sop_instance_uid": f"1.2.{number}",
        "source": f"{number}.dcm",
        "visit": "",
        "site": "",
        "format": "dicom",
        "personal": "",
        "native_d": 60,
        "native_h": 200,
        "native_w": 200,
        "spacing_z_mm": 0.12,
        "spacing_y_mm": 0.004,
        "spacing_x_mm": 0.012,
        "provenance_slice": "positions",
        "provenance_depth": "shared",
        "provenance_column": "shared",
        "uncertain": "",
        "notes": "",
        "mirrored": False,
        "tissue_mean": 100.0,
        "tissue_std": 20.0,
        "tissue_share": 0.3,
        "quality": 0.8,
        "enface_hash": "",
        "split": "",
        "file": f"{number}.dcm",
        "file_key": f"key{number}",
        "file_size": 1,
        "file_mtime_ns": 1,
        "manifest_hash": "",
        "user_spacing_mm": "",
        **fields,
    }


def store_of(path: Path, rows: Iterable[dict[str, Any]], participants: Iterable[dict[str, Any]] = ()) -> Store:
    """A store that holds these rows and participants {person_id, clinical_site, recommended_split}."""
    store = Store.create(path, Preprocessing())
    for row in rows:
        store.add(IndexEntry(**row))
    empty = {"clinical_site": "", "study_group": "", "age": None, "recommended_split": ""}
    store.add_participants([{**empty, **person} for person in participants])
    store.consolidate()
    return Store.open(path)
