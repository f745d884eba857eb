"""Links in a folder from somebody else are not followed out of it, and no checkpoint is written through a link."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eye_files import phantom, write_images, write_sidecar, write_voxels
from oct_dicom import make_dataset, retina, save
from octjepa.checkpoint.folder import write_folder
from octjepa.checkpoint.location import check_writable
from octjepa.errors import UsageError, VolumeRejected
from octjepa.ingest import build_store, discover
from octjepa.read.reader import read_volume
from octjepa.store import Store
from octjepa.train import loop
from synthetic import MemoryStore, small_recipe
from vendor_files import write_heyex_xml, write_optovue

PIXELS, SPACING = phantom()


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder from somebody else, next to one with files of the user."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "foreign").mkdir()
    return tmp_path / "foreign"


def reason_of(path: Path) -> str:
    with pytest.raises(VolumeRejected) as caught:
        read_volume(path)
    return caught.value.reason


# -- scans --


def test_a_linked_scan_is_neither_read_nor_hashed(foreign: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        save(make_dataset(retina(seed=seed)), tmp_path / "mine" / f"scan{seed}.dcm")
    save(make_dataset(retina(seed=3)), foreign / "theirs.dcm")
    (foreign / "linked.dcm").symlink_to("../mine/scan1.dcm")
    (foreign / ".hidden").symlink_to("../mine/scan2.dcm")
    (foreign / "twice.dcm").symlink_to(".hidden")  # a link to a link
    (foreign / "inside.dcm").symlink_to("theirs.dcm")
    preprocessing = small_recipe().preprocessing
    summary = build_store([foreign], tmp_path / "store", preprocessing, workers=1, max_lost=1)
    assert summary.by_reason == {"path_escapes": 2}
    assert [Path(source).name for source in Store.open(tmp_path / "store").table["source"]] == ["theirs.dcm"]
    rows = [json.loads(line) for line in (tmp_path / "store" / "quarantine.jsonl").read_text().splitlines()]
    assert all(row["hash"] == "" and "leads out of the folder" in row["detail"] for row in rows)


def test_a_linked_folder_of_pictures_or_table_is_not_followed(foreign: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "mine", PIXELS)
    (foreign / "eye").symlink_to(tmp_path / "mine")
    save(make_dataset(retina(seed=2)), foreign / "theirs.dcm")
    (tmp_path / "mine" / "people.tsv").write_text("person_id\tfilepath\nAnna\ttheirs.dcm\n")
    found = discover([foreign])
    assert [file.name for file in found.files] == ["theirs.dcm"]
    assert found.ignored == {"linked folder": 1}
    (foreign / "manifest.tsv").symlink_to(tmp_path / "mine" / "people.tsv")
    for source in (foreign, foreign / "theirs.dcm"):
        with pytest.raises(UsageError, match="is a link that leads out of its folder"):
            discover([source])
    (row,) = (file.row for file in discover([foreign / "manifest.tsv"]).files)  # named by the user
    assert row is not None
    assert row.person_id == "Anna"


def test_a_picture_among_those_of_a_scan_that_is_a_link_is_not_read(foreign: Path, tmp_path: Path) -> None:
    write_images(foreign / "eye", PIXELS)
    write_sidecar(foreign / "eye.json", spacing_mm=SPACING)
    assert np.array_equal(read_volume(foreign / "eye").pixels, PIXELS)
    picture = sorted((foreign / "eye").iterdir())[3]
    picture.rename(tmp_path / "mine" / "own.png")
    picture.symlink_to(tmp_path / "mine" / "own.png")
    assert reason_of(foreign / "eye") == "path_escapes"


def test_json_beside_a_scan_that_is_a_link_is_not_read(foreign: Path, tmp_path: Path) -> None:
    write_sidecar(tmp_path / "mine" / "own.json", spacing_mm=SPACING, person_id="Anna")
    np.save(foreign / "scan.npy", PIXELS)
    (foreign / "scan.json").symlink_to(tmp_path / "mine" / "own.json")
    assert reason_of(foreign / "scan.npy") == "path_escapes"
    write_images(foreign / "eye", PIXELS)
    (foreign / "eye" / "spacing.json").symlink_to("../../mine/own.json")
    assert reason_of(foreign / "eye") == "path_escapes"
    (foreign / "scan.json").unlink()
    write_sidecar(foreign / "named.json", spacing_mm=SPACING)
    (foreign / "scan.json").symlink_to("named.json")  # within the folder
    assert read_volume(foreign / "scan.npy").spacing_mm == pytest.approx(SPACING)


def test_a_scan_that_the_user_names_by_a_link_keeps_its_linked_companions(foreign: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "mine" / "scan.npy", PIXELS)
    write_sidecar(tmp_path / "mine" / "scan.json", spacing_mm=SPACING)
    write_voxels(tmp_path / "mine" / "eye.mhd", PIXELS, SPACING)
    for name in ("scan.npy", "scan.json", "eye.mhd", "eye.raw"):
        (foreign / name).symlink_to(tmp_path / "mine" / name)
    assert read_volume(foreign / "scan.npy").spacing_mm == pytest.approx(SPACING)
    assert read_volume(foreign / "eye.mhd").spacing_mm == pytest.approx(SPACING)


def test_text_and_pictures_of_vendors_that_are_links_are_not_read(foreign: Path, tmp_path: Path) -> None:
    path = write_optovue(foreign / "scan.OCT", [PIXELS.astype(np.float32)])
    text = path.with_suffix(".txt")
    text.rename(tmp_path / "mine" / "own.txt")
    text.symlink_to(tmp_path / "mine" / "own.txt")
    assert reason_of(path) == "path_escapes"
    xml = write_heyex_xml(foreign / "export", [PIXELS])
    pictures = [path for path in sorted(xml.parent.iterdir()) if path.suffix != ".xml"]
    assert pictures
    pictures[2].rename(tmp_path / "mine" / "own.tif")
    pictures[2].symlink_to(tmp_path / "mine" / "own.tif")
    assert reason_of(xml) == "path_escapes"


# -- checkpoints --


@pytest.mark.parametrize("target", ["mine", "nowhere"])
def test_a_run_with_a_linked_checkpoint_folder_is_refused_before_it_trains(
    foreign: Path, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(checkpoint={"every_updates": 2})
    (foreign / "checkpoints").symlink_to(tmp_path / target)
    monkeypatch.setattr(loop, "_train", lambda run: pytest.fail("it trained"))
    with pytest.raises(UsageError, match=r"checkpoints is a link to .*, and no checkpoint is written through it"):
        loop.pretrain(recipe, MemoryStore(recipe.preprocessing), foreign)
    assert sorted(path.name for path in foreign.iterdir()) == ["checkpoints"]
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.slow
def test_a_resumed_run_refuses_a_checkpoint_folder_that_became_a_link(foreign: Path, tmp_path: Path) -> None:
    recipe = small_recipe(checkpoint={"every_updates": 2})
    store = MemoryStore(recipe.preprocessing)
    loop.pretrain(recipe, store, foreign)
    (foreign / "checkpoints").rename(tmp_path / "mine" / "moved")
    (foreign / "checkpoints").symlink_to(tmp_path / "mine" / "moved")
    (foreign / "summary.json").unlink()
    with pytest.raises(UsageError, match="no checkpoint is written through it"):
        loop.pretrain(recipe, store, foreign, resume=True)


def test_a_folder_between_a_run_and_its_checkpoints_is_no_link_either(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(checkpoint={"every_updates": 2, "dir": "saves/now"})
    (foreign / "saves").symlink_to(tmp_path / "mine")
    monkeypatch.setattr(loop, "_train", lambda run: pytest.fail("it trained"))
    with pytest.raises(UsageError, match=r"saves is a link to .* or name its target as checkpoint\.dir"):
        loop.pretrain(recipe, MemoryStore(recipe.preprocessing), foreign)


@pytest.mark.slow
def test_a_run_whose_own_folder_is_a_link_of_the_user_works(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    recipe = small_recipe(checkpoint={"every_updates": 2})
    loop.pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run")
    assert len(list((tmp_path / "disk" / "checkpoints").glob("step-*"))) == 2


def test_what_stands_in_the_way_of_checkpoints_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "new" / "checkpoints")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="file is a file"):
        check_writable(tmp_path / "file" / "checkpoints")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="step-00000001 is a link"):
        check_writable(tmp_path / "run")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(UsageError, match="may not be written"):
        check_writable(tmp_path / "new")


def test_a_checkpoint_replaces_a_link_at_its_path_and_leaves_its_target(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "own.txt").write_text("precious")
    (foreign / "step-00000003").symlink_to(tmp_path / "mine")
    (foreign / ".step-00000003.partial").symlink_to(tmp_path / "mine")
    write_folder(foreign, 3, {}, {})
    assert not (foreign / "step-00000003").is_symlink()
    assert (foreign / "step-00000003" / "manifest.json").is_file()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["own.txt"]
