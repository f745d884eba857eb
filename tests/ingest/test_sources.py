"""Discovery, manifests of three generations, and the list of reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oct_dicom import make_dataset, retina, save
from octjepa.errors import UsageError
from octjepa.ingest import REASONS, discover, read_volume
from octjepa.ingest.identity import region_of
from octjepa.ingest.reasons import ledger_row, rejected

PIXELS = retina(frames=6)
NAMES = (
    "1234_maestro2_3d_macula_oct_l_1.2.3.dcm",
    "1234_maestro2_3d_macula_oct_oct_l_1.2.4.dcm",
    "1234_maestro2_macula_6x6_octa_oct_r_1.2.5.dcm",
)


def tree(root: Path, id_column: str = "person_id") -> Path:
    folder = root / "retinal_oct" / "structural_oct" / "topcon_maestro2" / "1234"
    rows = [
        f"{id_column}\tmanufacturer\tmanufacturers_model_name\tanatomic_region\tlaterality\tpixel_spacing\tslice_thickness\tfilepath"
    ]
    for name in NAMES:
        save(make_dataset(PIXELS), folder / name)
        side = "L" if "_l_" in name else "R"
        rows.append(
            f"1234\tTopcon\tMaestro2\tMacula\t{side}\t[0.0026, 0.0117]\t0.05\t/{(folder / name).relative_to(root)}"
        )
    rows.append("1300\tTopcon\tMaestro2\tMacula\tL\tVaries by frame\tNot reported\t/retinal_oct/absent.dcm")
    (root / "retinal_oct" / "manifest.tsv").write_text("\n".join(rows) + "\n")
    (root / "participants.tsv").write_text(
        f"{id_column}\tclinical_site\tstudy_group\tage\trecommended_split\n1234\tUW\thealthy\t61\ttrain\n"
    )
    return root


@pytest.mark.parametrize("id_column", ["person_id", "participant_id"])
def test_a_tree_with_its_manifest(tmp_path: Path, id_column: str) -> None:
    root = tree(tmp_path / "set", id_column)
    for source in (root, root / "retinal_oct", root / "retinal_oct" / "manifest.tsv"):
        found = discover([source])
        assert [file.path.name for file in found.files] == sorted(NAMES)
        assert all(file.row is not None and file.row.person_id == "1234" for file in found.files)
        assert found.files[0].name.startswith("retinal_oct/structural_oct/")
        assert [file.path.name for file in found.missing] == ["absent.dcm"]
        assert found.participants[0]["recommended_split"] == "train"
    device = discover([root / "retinal_oct" / "structural_oct" / "topcon_maestro2"])
    assert len(device.files) == 3
    assert not device.missing  # the manifest's other folders were not asked for


def test_manifest_spacing_stands_in_for_the_header(tmp_path: Path) -> None:
    root = tree(tmp_path / "set")
    path = next(root.rglob(NAMES[0]))
    ds = make_dataset(PIXELS, pitch_mm=None)
    del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    save(ds, path)
    volume = read_volume(path)
    assert volume.spacing_mm == (0.05, 0.0026, 0.0117)
    assert set(volume.provenance.values()) == {"manifest"}


def test_side_files_are_left_out_and_false_dicom_is_kept_for_the_ledger(tmp_path: Path) -> None:
    save(make_dataset(PIXELS), tmp_path / "no_suffix")
    (tmp_path / "._scan.dcm").write_bytes(b"mac")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "truth.npz").write_bytes(b"PK")
    (tmp_path / "empty.dcm").write_bytes(b"")
    found = discover([tmp_path])
    assert [file.name for file in found.files] == ["empty.dcm", "no_suffix"]
    assert found.ignored == {"hidden": 1, ".txt": 1, ".npz": 1}


def test_a_bucket_is_told_apart_from_a_missing_folder() -> None:
    with pytest.raises(UsageError, match=r"gs://eyes/oct is no local path"):
        discover(["gs://eyes/oct"])


def test_what_is_no_source_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file or folder at"):
        discover([tmp_path / "absent"])
    with pytest.raises(UsageError, match="it is empty"):
        discover([tmp_path])
    (tmp_path / "a.tsv").write_text("x\ty\n1\t2\n")
    with pytest.raises(UsageError, match="no column 'filepath'"):
        discover([tmp_path / "a.tsv"])


def test_region_words() -> None:
    assert region_of("maestro2_macula_6x6_octa") == "Macula, 6 x 6"
    assert region_of("spectralis onh rc hr oct") == "Optic Disc"
    assert region_of("maestro2 3d wide oct") == "Wide Field"


def test_reason_codes_are_closed_and_documented(root: Path) -> None:
    with pytest.raises(KeyError):
        rejected("made_up", "")
    with pytest.raises(KeyError):
        ledger_row("f", "", "read", "made_up", "")
    page = (root / "docs" / "ingest.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \|", page, re.MULTILINE))
    assert documented == {code: f"{reason.meaning}" for code, reason in REASONS.items()}
    for source in (root / "src" / "octjepa").rglob("*.py"):
        for code in re.findall(r"rejected\(\s*\"([a-z_]+)\"", source.read_text(encoding="utf-8")):
            assert code in REASONS, f"{source.name} uses {code}"
