"""What one file can do to an ingest: be refused with a reason, and never end it for the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octjepa.errors import OctjepaError, VolumeRejected
from octjepa.recipe import Preprocessing

PREPROCESSING = Preprocessing(
    image_size=(8, 64, 64), margin=(0, 8, 8), target_spacing_mm=(0.7, 0.0156, 0.094), axial_anchor=0.65
)


def test_what_canonicalising_did_not_expect_refuses_one_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octjepa.ingest import build_store, one_file
    from octjepa.store import Store

    real, calls = one_file.canonicalise, []

    def failing(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise IndexError("index -1 is out of bounds\nsecond line")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(one_file, "canonicalise", failing)
    summary = build_store([tiny], tmp_path / "store", PREPROCESSING)
    assert (summary.accepted, summary.by_reason) == (9, {"reader_failed": 1})
    (row,) = Store.open(tmp_path / "store").quarantine
    assert row["stage"] == "canonicalise"
    assert row["detail"] == "IndexError raised in test_ingest_one.failing: index -1 is out of bounds"
    assert row["hash"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OctjepaError("the disk is full")])
def test_a_full_disk_is_not_the_files_fault(
    error: Exception, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octjepa.ingest import build_store, one_file

    def failing(*_: object) -> object:
        raise error

    monkeypatch.setattr(one_file, "canonicalise", failing)
    with pytest.raises(type(error)):
        build_store([tiny], tmp_path / "store", PREPROCESSING)


def test_a_scan_that_flattening_leaves_nothing_of_has_no_tissue() -> None:
    from octjepa.canonical.pipeline import intensity_scale

    image = np.zeros((4, 8, 8), np.float32)
    with pytest.raises(VolumeRejected, match="no_tissue"):
        intensity_scale(image, np.zeros(image.shape, bool), (1.0, 99.0))
