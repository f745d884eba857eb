"""What was corrected after an ingest reaches the pixels, and the store keeps no path and no older canonicalisation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from oct_dicom import make_dataset, retina, save
from octjepa.errors import ContractError
from octjepa.recipe import Preprocessing

PREPROCESSING = Preprocessing(
    image_size=(8, 64, 64), margin=(0, 8, 8), target_spacing_mm=(0.7, 0.0156, 0.094), axial_anchor=0.65
)


def tree(root: Path, pitch: float = 0.05, side: str = "R", person: str = "1") -> Path:
    """One scan whose pitch and eye only the manifest knows."""
    if not (root / "scan.dcm").is_file():
        ds = make_dataset(retina(), pitch_mm=None)
        del ds.ImageLaterality, ds.SharedFunctionalGroupsSequence[0].FrameAnatomySequence
        save(ds, root / "scan.dcm")
    (root / "manifest.tsv").write_text(
        f"person_id\tlaterality\tpixel_spacing\tslice_thickness\tfilepath\n"
        f"{person}\t{side}\t[0.0026, 0.0117]\t{pitch}\t/scan.dcm\n"
    )
    return root


def test_a_corrected_manifest_reaches_row_and_pixels(tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    root, path = tree(tmp_path / "set"), tmp_path / "store"
    build_store([root], path, PREPROCESSING)
    store = Store.open(path)
    (name,) = store.table["volume_id"]
    before = store.read(name)
    pixels, band = np.array(before.pixels), before.band.copy()
    assert build_store([root], path, PREPROCESSING).skipped == 1

    tree(root, pitch=0.3, side="L", person="2")
    assert build_store([root], path, PREPROCESSING).accepted == 1
    store = Store.open(path)
    (row,) = store.table.to_dict("records")
    assert (row["volume_id"], row["spacing_z_mm"], row["eye"], row["person_id"]) == (name, 0.3, "OS", "2")
    after = store.read(name)
    build_store([root], tmp_path / "fresh", PREPROCESSING)
    fresh = Store.open(tmp_path / "fresh").read(name)
    assert np.array_equal(after.pixels, fresh.pixels)
    assert np.array_equal(after.band, fresh.band)
    assert not np.array_equal(after.pixels, pixels)
    assert not np.array_equal(after.band, band)
    assert sorted(file.name for file in (path / "chunks").rglob("*") if file.is_file()) == [
        "geometry.npz",
        "pixels.npy",
    ]


def test_a_second_copy_leaves_the_first_ones_pixels_alone(tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    root, path = tree(tmp_path / "set"), tmp_path / "store"
    shutil.copy(root / "scan.dcm", root / "twin.dcm")
    with (root / "manifest.tsv").open("a") as file:
        file.write("1\tL\t[0.0026, 0.0117]\t0.3\t/twin.dcm\n")
    assert build_store([root], path, PREPROCESSING).by_reason == {"duplicate_content": 1}
    (root / "twin.dcm").unlink()
    tree(root)
    build_store([root], tmp_path / "one", PREPROCESSING)
    (name,) = Store.open(path).table["volume_id"]
    assert np.array_equal(Store.open(path).read(name).pixels, Store.open(tmp_path / "one").read(name).pixels)
    assert not list((path / "chunks").rglob(".*"))


def test_a_file_with_other_content_replaces_its_volume(tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    root, path = tmp_path / "set", tmp_path / "store"
    save(make_dataset(retina(seed=1)), root / "scan.dcm")
    build_store([root], path, PREPROCESSING)
    (first,) = Store.open(path).table["volume_id"]
    save(make_dataset(retina(seed=2)), root / "scan.dcm")
    build_store([root], path, PREPROCESSING)
    (second,) = Store.open(path).table["volume_id"]
    assert second != first
    assert not Store.open(path).chunk_folder(first).exists()
    (root / "scan.dcm").unlink()
    save(make_dataset(retina(seed=4)), root / "other.dcm")
    build_store([root], path, PREPROCESSING)
    assert len(Store.open(path).table) == 2  # a source that was cleared away does not take its volume along


def test_no_absolute_path_enters_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas as pd

    from octjepa.ingest import build_store

    for name in ("first", "second"):
        root = tree(tmp_path / "Doe John" / name, person=name)
        save(make_dataset(retina(seed=len(name))), root / "scan.dcm")
        (root / "bad.dcm").write_bytes(b"")
        with (root / "manifest.tsv").open("a") as file:
            file.write("1\tL\t\t\t/absent.dcm\n")
    sources = [tmp_path / "Doe John" / name for name in ("first", "second")]
    summary = build_store(sources, tmp_path / "store", PREPROCESSING, max_lost=0.9)
    assert summary.by_reason == {"empty_file": 2, "manifest_row_without_file": 2}
    lines = (tmp_path / "store" / "quarantine.jsonl").read_text()
    assert len(lines.splitlines()) == 4  # the same name below two roots is two files
    text = lines + pd.read_parquet(tmp_path / "store" / "volumes.parquet").to_csv()
    assert "Doe" not in text
    assert str(tmp_path) not in text
    again = build_store(sources, tmp_path / "store", PREPROCESSING, max_lost=0.9)
    assert (again.accepted, again.skipped) == (0, 2)
    monkeypatch.chdir(sources[0])
    assert build_store(["."], tmp_path / "store", PREPROCESSING, max_lost=0.9).skipped == 1


def test_a_store_of_an_older_canonicalisation_says_so(tiny: Path, tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store
    from octjepa.volume import CANONICAL_VERSION

    path = tmp_path / "store"
    build_store([tiny], path, PREPROCESSING)
    about = json.loads((path / "store.json").read_text())
    assert about["canonical_version"] == CANONICAL_VERSION == Store.open(path).describe().canonical_version
    (path / "store.json").write_text(json.dumps({**about, "canonical_version": CANONICAL_VERSION - 1}))
    with pytest.raises(ContractError, match=f"made by canonicalisation {CANONICAL_VERSION - 1}, .*new --store"):
        build_store([tiny], path, PREPROCESSING)
    assert len(Store.open(path).table) == 10  # reading it continues
