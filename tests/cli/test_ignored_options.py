"""An option without effect is refused in one line that names the option, also if its value equals the default."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command_line import call
from index_entries import index_entry, store_of
from oct_dicom import make_dataset, retina, save


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A scan in a folder, a picture, and a store without pixels."""
    root = tmp_path_factory.mktemp("ignored")
    save(make_dataset(retina(4, 32, 32)), root / "scans" / "a.dcm")
    Image.fromarray(np.zeros((32, 32), np.uint8)).save(root / "a.png")
    store_of(root / "store", [index_entry(number) for number in range(6)])
    return {
        "SCAN": root / "scans" / "a.dcm",
        "FOLDER": root / "scans",
        "PICTURE": root / "a.png",
        "STORE": root / "store",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "segment PICTURE --out OUT --format dicom",
            "--format is for scans and a trained head, not for single B-scans",
        ),
        ("segment PICTURE --out OUT --format both", "--format is for scans and a trained head, not for single B-scans"),
        ("segment PICTURE --out OUT --no-baseline", "--no-baseline is for adapt, not for single B-scans"),
        ("segment SCAN --out OUT --no-baseline", "--no-baseline is for adapt, not for scans"),
        ("segment SCAN --out OUT --baseline", "--baseline is for adapt, not for scans"),
        (
            "segment adapt SCAN --labels FOLDER --out OUT --format nifti",
            "--format is for scans and a trained head, not for adapt",
        ),
        (
            "segment adapt SCAN --labels FOLDER --out OUT --max-lost 0.2",
            "--max-lost is for scans, single B-scans and a trained head, not for adapt",
        ),
        ("segment SCAN --scan SCAN --out OUT", "--scan is for a trained head, not for scans"),
        ("segment PICTURE --labels FOLDER --out OUT", "--labels is for adapt and a recipe, not for single B-scans"),
        (
            "segment segment_linear --store STORE --out OUT --format nifti",
            "--format is for scans and a trained head, not for a recipe",
        ),
        (
            "segment segment_linear --store STORE --out OUT --max-lost 0.5",
            "--max-lost is for scans, single B-scans and a trained head, not for a recipe",
        ),
        ("inspect FOLDER --spacing 0.1,0.004,0.01", "--spacing is for a scan, and FOLDER is a folder of scans"),
        ("inspect STORE --spacing file", "--spacing is for a scan, and STORE is a store"),
        ("inspect phantom-unet --verify", "--verify is for a store, and phantom-unet is an encoder"),
        ("inspect SCAN --verify", "--verify is for a store, and SCAN is a scan"),
        ("split STORE --seed 0", "--seed is unused by --by recommended"),
        ("split STORE --against phantom-tiny --seed 0", "leave out the options of a split"),
        ("view SCAN --scans FOLDER", "--scans is for a store, a run or a result of segment, and SCAN is a scan"),
        ("view FOLDER --scans FOLDER", "and FOLDER is a folder of scans"),
        ("export phantom-tiny --format safetensors --out OUT --public", "--public is about a repository"),
        ("embed phantom-tiny --store STORE --out OUT.parquet --workers 2", "--workers is for --engine ray"),
        ("predict FOLDER --store STORE --out OUT --workers 1", "--workers is for scans that are read"),
        ("predict FOLDER --store STORE --out OUT --max-lost 0.2", "--max-lost is for scans that are read"),
    ],
)
def test_an_option_without_effect_is_refused(paths: dict[str, Path], tmp_path: Path, words: str, message: str) -> None:
    positions = {**paths, "OUT": tmp_path / "out", "OUT.parquet": tmp_path / "out.parquet"}
    for name, path in paths.items():
        message = message.replace(name, str(path))
    outcome = call(*(positions.get(word, word) for word in words.split()))
    assert outcome.code == 2, outcome.err
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_same_options_are_taken_where_they_have_an_effect(paths: dict[str, Path]) -> None:
    spacing = ("--spacing", "0.1,0.004,0.01")
    assert call("inspect", paths["SCAN"], *spacing, "--json").json["spacing_mm"] == [0.1, 0.004, 0.01]
    assert call("split", paths["STORE"], "--assign-rest", "--seed", 1, "--json").json["train"] == 1
