"""Writes weights of an encoder into the package: in 16 bit, without paths of this machine, with card and checksums."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from octjepa.encoders.export import CARD, SUMS, WEIGHTS, with_sorted_metadata
from octjepa.files import write_json

PACKAGED = Path(__file__).resolve().parents[1] / "src" / "octjepa" / "weights"
RECORD = "run.json"


def write_package(
    name: str,
    export: Callable[[Path], object],
    edit_card: Callable[[str], str],
    record: Mapping[str, object],
    target: Path,
) -> None:
    """Writes `target` anew. `export` writes safetensors into a folder, `edit_card` completes its model card."""
    with tempfile.TemporaryDirectory() as temporary:
        exported = Path(temporary) / name
        export(exported)
        with safe_open(exported / WEIGHTS, "pt") as file:
            metadata = without_paths(file.metadata())
            halves = {key: file.get_tensor(key).to(torch.float16) for key in file.keys()}  # noqa: SIM118
        (exported / WEIGHTS).write_bytes(with_sorted_metadata(save(halves, metadata)))
        card = (exported / CARD).read_text(encoding="utf-8")
        card = card.replace("octjepa.load_encoder(folder)", f'octjepa.load_encoder("{name}")')
        (exported / CARD).write_text(edit_card(card), encoding="utf-8")
        write_json(exported / RECORD, dict(record))
        hashes = {file: hashlib.sha256((exported / file).read_bytes()).hexdigest() for file in (WEIGHTS, CARD, RECORD)}
        sums = [f"{digest}  {file}\n" for file, digest in hashes.items()]
        (exported / SUMS).write_text("".join(sums), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(exported, target, ignore=shutil.ignore_patterns(".*"))
        (target / WEIGHTS).chmod(0o644)


def without_paths(metadata: dict[str, str]) -> dict[str, str]:
    """The metadata of weights without the folders of other weights, which exist on one machine only."""
    about = json.loads(metadata["octjepa"])
    about["recipe"]["model"]["warm_start"] = None
    about["recipe"]["objective"]["teacher"] = None
    return {**metadata, "octjepa": json.dumps(about)}
