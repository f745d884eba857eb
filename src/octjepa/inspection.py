"""Describes a path: a scan, a folder of scans, a store, a run, a checkpoint, or what was made with one.

No description holds personal data.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octjepa.errors import UsageError
from octjepa.files import read_json_object
from octjepa.remote import info, is_remote, local_copy
from octjepa.remote.address import parse

if TYPE_CHECKING:
    from octjepa.encoders.base import FrozenEncoder
    from octjepa.read.reader import SpacingOption

_ANEW = "restore it from a copy, or start a new run with another --out"
_LISTS = {".tsv", ".csv", ".txt", ".lst"}


def describe(path: str | Path, spacing_mm: SpacingOption = None, verify: bool = False) -> dict[str, Any]:
    """Describes `path`: its `kind`, and keys that depend on the kind.

    Kinds: volume, rejected, source, store, run (of pretraining), fine-tuning, segmentation (a head), checkpoint.
    The name of an encoder that comes with the package is a checkpoint.

    A folder of scans is a source: its files are counted by kind and device, and the personal data in them by field.
    `spacing_mm` (slice, depth, column) precedes the spacing in the file. With `verify` every chunk of a store is read
    and held against its SHA-256: `damaged` lists the volumes that are not what was written.
    Raises UsageError when the path is absent, cannot be read or is of no known kind, or if an option has no effect on
    it; CheckpointError for damaged weights.
    """
    from octjepa.ingest.audit import audit
    from octjepa.ingest.source_file import how_to_expand, is_archive
    from octjepa.read.formats import recognise
    from octjepa.read.reader import describe_file
    from octjepa.shipped import is_segmenter, packaged_encoders, shipped

    if is_remote(path):
        return _describe_remote(str(path), spacing_mm, verify)
    if shipped(path) is not None or is_segmenter(path):
        _refuse_unused(path, "an encoder", spacing_mm, verify)
        return _checkpoint(path)
    path = Path(path)
    if not path.exists():
        raise UsageError(
            f"nothing at {path}: give a scan file, a store, a run or a checkpoint, or the name of an encoder of the "
            f"package ({', '.join(packaged_encoders())})"
        )
    if path.is_file() and is_archive(path.name):
        raise UsageError(f"{path} is an archive: {how_to_expand(path.name)}")
    if path.is_file() and path.suffix.lower() in _LISTS:
        _refuse_unused(path, "a list of scans", spacing_mm, verify)
        return {"kind": "source", **audit([path]).to_json()}
    if path.is_file() and path.suffix != ".safetensors":
        _refuse_unused(path, "a scan", verify=verify)
        return {**describe_file(path, spacing_mm), "personal_data": _personal(path)}
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise UsageError(
            f"the folder {path} cannot be read: change its permissions, or run the command as a user who may read it"
        )
    if (path / "store.json").is_file():
        _refuse_unused(path, "a store", spacing_mm)
        return _store(path, verify)
    if (path / "run.json").is_file():
        _refuse_unused(path, "a run", spacing_mm, verify)
        return _run(path)
    if (path / "head").is_dir() and (task_folder := _task_folder(path)) is not None:
        _refuse_unused(path, "the result of a training", spacing_mm, verify)
        return task_folder
    if path.is_file() or any((path / name).is_file() for name in ("manifest.json", "model.safetensors")):
        _refuse_unused(path, "a checkpoint", spacing_mm, verify)
        return _checkpoint(path)
    if path.is_dir() and recognise(path) is not None:
        _refuse_unused(path, "a scan", verify=verify)
        return describe_file(path, spacing_mm)
    if not path.is_dir():
        raise UsageError(f"{path} is neither a file nor a folder: give a scan file, a store, a run or a checkpoint")
    _refuse_unused(path, "a folder of scans", spacing_mm, verify)
    try:
        return {"kind": "source", **audit([path]).to_json()}
    except UsageError as error:
        raise UsageError(
            f"{path} holds no store (store.json), run (run.json) or checkpoint (manifest.json), and {error}"
        ) from None


def _refuse_unused(path: str | Path, kind: str, spacing_mm: SpacingOption = None, verify: bool = False) -> None:
    """Raises UsageError if the user gave an option that has no effect on a path of this `kind`."""
    for use, is_given in (("--spacing is for a scan", spacing_mm is not None), ("--verify is for a store", verify)):
        if is_given:
            raise UsageError(f"{use}, and {path} is {kind}: leave the option out")


def _personal(path: Path) -> dict[str, str]:
    """{field: "name, masked"} of the personal data that a scan's file holds; the values stay in the file."""
    from octjepa.ingest.audit import personal_fields_in_file
    from octjepa.read.personal_data import FIELD_KINDS

    return {field: f"{FIELD_KINDS.get(field, 'other')}, masked" for field in personal_fields_in_file(path)}


def _describe_remote(url: str, spacing_mm: SpacingOption, verify: bool) -> dict[str, object]:
    from octjepa.checkpoint.location import has_file
    from octjepa.read.reader import describe_file

    if has_file(url, "store.json"):
        _refuse_unused(url, "a store", spacing_mm)
        return _store(url, verify)
    if url.endswith(".safetensors") or has_file(url, "manifest.json"):
        _refuse_unused(url, "a checkpoint", spacing_mm, verify)
        return _checkpoint(url)
    if parse(url).key and info(url) is not None:
        _refuse_unused(url, "a scan", verify=verify)
        with local_copy(url) as path:
            return {**describe_file(path, spacing_mm), "personal_data": _personal(path)}
    _refuse_unused(url, "a folder of scans", spacing_mm, verify)
    from octjepa.ingest.audit import audit

    return {"kind": "source", **audit([url]).to_json()}


def _store(path: str | Path, verify: bool) -> dict[str, object]:
    from octjepa.store import Store

    store = Store.open(path)
    return {"kind": "store", **store.describe().to_json(), **({"damaged": store.damaged()} if verify else {})}


def _checkpoint(path: str | Path) -> dict[str, object]:
    from octjepa.encoders import load_encoder
    from octjepa.encoders.locate import open_encoder
    from octjepa.shipped import is_segmenter

    if is_segmenter(path):
        return _encoder_facts(open_encoder(path))
    pretrained = load_encoder(path)
    return {**_encoder_facts(pretrained), "encoder": pretrained.which}


def _encoder_facts(encoder: FrozenEncoder) -> dict[str, object]:
    return {
        "kind": "checkpoint",
        "recipe": encoder.name,
        "dim": encoder.dim,
        "encoder_parameters": encoder.parameters,
        "preprocessing": encoder.preprocessing.model_dump(mode="json"),
    }


def _run(path: Path) -> dict[str, object]:
    """Of pretraining, which names no kind in run.json, or of a supervised task."""
    about = read_json_object(path / "run.json", _ANEW)
    if "kind" not in about:
        return {"kind": "run", **about, **_results(path)}
    folder = _task_folder(path)
    if folder is None:
        raise UsageError(f"{path} is a run of the kind {about['kind']!r}, which no installed task describes")
    return folder


def _task_folder(path: Path) -> dict[str, object] | None:
    """Of a folder that a supervised task wrote; None if none did."""
    from octjepa.tasks import find_task

    task = find_task(path)
    return None if task is None else task.describe(path)


def _results(run: Path) -> dict[str, object]:
    """The results of a finished run."""
    summary = run / "summary.json"
    if not summary.is_file():
        return {"finished": False}
    reported = ("updates", "loss", "cosine", "baseline_cosine", "checkpoint")
    results = read_json_object(summary, _ANEW)
    return {"finished": True, **{key: results[key] for key in reported if key in results}}
