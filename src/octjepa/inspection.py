"""What a path is: a scan file, a store, a run or a checkpoint, in one plain description without personal data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octjepa.errors import UsageError


def describe(path: Path) -> dict[str, Any]:
    """`kind` is volume, rejected, store, run or checkpoint; the rest is what that kind knows of itself.

    Raises UsageError when nothing is there, or a folder is none of these.
    """
    if not path.exists():
        raise UsageError(f"nothing at {path}: give a scan file, a store, a run or a checkpoint")
    if path.is_file() and path.suffix != ".safetensors":
        from octjepa.ingest import describe_file

        return describe_file(path)
    if (path / "store.json").is_file():
        from octjepa.store import Store

        return {"kind": "store", **Store.open(path).describe()}
    if (path / "run.json").is_file():
        return {"kind": "run", **json.loads((path / "run.json").read_text(encoding="utf-8"))}
    if path.is_file() or (path / "manifest.json").is_file():
        from octjepa.checkpoint import load_encoder

        encoder = load_encoder(path)
        return {
            "kind": "checkpoint",
            "recipe": encoder.name,
            "dim": encoder.dim,
            "encoder_parameters": encoder.parameters,
            "preprocessing": encoder.recipe.preprocessing.model_dump(mode="json"),
        }
    raise UsageError(f"{path} is a folder, but no store (store.json), run (run.json) or checkpoint (manifest.json)")
