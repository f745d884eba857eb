"""Discovery on disks: trees, globs, lists, manifests of three generations, what is refused; and the list of reasons."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from oct_dicom import make_dataset, retina, save
from octjepa.errors import UsageError
from octjepa.ingest import Discovery, discover
from octjepa.ingest.source_file import SourceFile
from octjepa.read import formats
from octjepa.read.formats import metaimage
from octjepa.read.formats.metaimage import named_voxel_file
from octjepa.read.formats.vendor.heyex_xml import pictures_in
from octjepa.read.identity import parse_region
from octjepa.read.reader import read_volume
from octjepa.reasons import REASONS, quarantine_record, rejection

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
    assert not device.missing  # the manifest's other folders were not option for


def test_manifest_spacing_stands_in_for_the_header(tmp_path: Path) -> None:
    root = tree(tmp_path / "set")
    path = next(root.rglob(NAMES[0]))
    ds = make_dataset(PIXELS, pitch_mm=None)
    del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    save(ds, path)
    volume = read_volume(path)
    assert volume.spacing_mm == (0.05, 0.0026, 0.0117)
    assert set(volume.provenance.values()) == {"manifest"}


def test_side_files_are_left_out_and_false_dicom_goes_to_the_quarantine(tmp_path: Path) -> None:
    save(make_dataset(PIXELS), tmp_path / "no_suffix")
    (tmp_path / "._scan.dcm").write_bytes(b"mac")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "truth").mkdir()
    (tmp_path / "truth" / "eyes.tsv").write_text("of a phantom cohort")
    (tmp_path / "truth" / "1.2.3.npz").write_bytes(b"PK")
    (tmp_path / "page.html").write_text("x")
    (scan(tmp_path / "store" / "chunks" / "pixels.npy").parents[1] / "store.json").write_text("{}")
    (tmp_path / "empty.dcm").write_bytes(b"")
    found = discover([tmp_path])
    assert [file.name for file in found.files] == ["empty.dcm", "no_suffix"]
    assert found.ignored == {"hidden": 1, ".txt": 1, ".html": 1, "truth of phantoms": 1, "store of octjepa": 1}


def test_results_of_octjepa_next_to_scans_are_left_out_and_counted(tmp_path: Path) -> None:
    save(make_dataset(PIXELS), tmp_path / "inner" / "eye.dcm")
    save(make_dataset(PIXELS), tmp_path / "later.dcm")
    np.savez(tmp_path / "eye_boundaries.npz", rows=PIXELS)
    for name in ("eye_thickness.csv", "eye.png", "index.html"):
        (tmp_path / name).write_bytes(b"x")
    assert "eye_boundaries.npz" in [file.name for file in discover([tmp_path]).files]  # it may be the user's
    (tmp_path / "classes.json").write_text("{}")
    for source in (tmp_path, f"{tmp_path}/**/*"):
        found = discover([source])
        assert [file.path.name for file in found.files] == ["eye.dcm", "later.dcm"]
        assert found.ignored["folder with results of octjepa"] == 1


def test_what_is_no_source_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file or folder at"):
        discover([tmp_path / "absent"])
    with pytest.raises(UsageError, match="it is empty"):
        discover([tmp_path])
    (tmp_path / "a.tsv").write_text("x\ty\n1\t2\n")
    with pytest.raises(UsageError, match="no column 'filepath'"):
        discover([tmp_path / "a.tsv"])
    with pytest.raises(UsageError, match=r"http:// is not read: give a local path, gs://"):
        discover(["http://example.org/eyes"])
    with pytest.raises(UsageError, match=r"lost a slash: write gs://"):
        discover([Path("gs://eyes/oct")])
    with pytest.raises(UsageError, match="no source named"):
        discover([])
    with pytest.raises(UsageError, match=r'a source is an empty text: give a path, or "." for the current folder'):
        discover([str(tmp_path), ""])
    os.mkfifo(tmp_path / "pipe.dcm")
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        discover([tmp_path / "pipe.dcm"])


def scan(path: Path) -> Path:
    """What is recognised as DICOM, in 132 bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(128) + b"DICM")
    return path


def reasons(found: Discovery) -> dict[str, str]:
    return {one.source.name: one.reason for one in found.refused}


def names(found: Discovery) -> list[str]:
    return [file.name for file in found.files]


# Globs and lists


def test_a_glob_is_expanded_as_a_shell_would(tmp_path: Path) -> None:
    for name in ("1001/a.dcm", "1001/b.dcm", "1002/deep/c.dcm", "other/d.dcm", ".git/e.dcm"):
        scan(tmp_path / name)
    (tmp_path / "1001" / "notes.txt").write_text("x")
    (tmp_path / "round").symlink_to(tmp_path)  # a loop
    assert names(discover([f"{tmp_path}/**/*.dcm"])) == [
        "1001/a.dcm",
        "1001/b.dcm",
        "1002/deep/c.dcm",
        "other/d.dcm",
    ]
    found = discover([f"{tmp_path}/100[12]"])
    assert names(found) == ["a.dcm", "b.dcm", "deep/c.dcm"]
    assert found.ignored == {".txt": 1}
    assert names(discover([f"{tmp_path}/1001/?.dcm", f"{tmp_path}/**/a.dcm"])) == ["a.dcm", "b.dcm"]
    with pytest.raises(UsageError, match=r"nothing matches .*x\.dcm: check the pattern"):
        discover([f"{tmp_path}/**/x.dcm"])
    odd = scan(tmp_path / "set [1]" / "a.dcm")  # a folder that is really called so
    assert discover([odd.parent]).files[0].path == odd


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_list_names_files_relative_to_itself(tmp_path: Path, encoding: str) -> None:
    scan(tmp_path / "lists" / "ä b.dcm")
    elsewhere = scan(tmp_path / "elsewhere" / "c.dcm")
    scan(tmp_path / "folder" / "d.dcm")
    entries = f"# chosen\n\n  ä b.dcm  \n{elsewhere}\r\n../folder\nabsent.dcm\n"
    (tmp_path / "lists" / "chosen.LST").write_bytes(entries.encode(encoding))
    found = discover([tmp_path / "lists" / "chosen.LST"])
    assert [file.path.name for file in found.files] == ["c.dcm", "d.dcm", "ä b.dcm"]
    assert reasons(found) == {"absent.dcm": "manifest_row_without_file"}


def test_what_is_no_list_is_reported(tmp_path: Path) -> None:
    for content in (b"", b"# nothing\n", b"\x00\x01binary"):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(UsageError, match=r"a.txt is not a list of files: expected text with a path"):
            discover([tmp_path / "a.txt"])
    (tmp_path / "a.txt").write_text("gone.dcm\n")
    with pytest.raises(UsageError, match=r"1 manifest_row_without_file: .* finish the download"):
        discover([tmp_path / "a.txt"])


# Manifests


def manifest(root: Path, *rows: str, columns: str = "person_id\tfilepath\tlaterality") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "manifest.tsv").write_text("\n".join([columns, *rows]) + "\n")
    return root / "manifest.tsv"


def test_a_row_never_leads_out_of_its_root(tmp_path: Path) -> None:
    secret = scan(tmp_path / "secret" / "s.dcm")
    root = tmp_path / "set"
    scan(root / "a.dcm")
    (root / "link.dcm").symlink_to(secret)
    (root / "linked").symlink_to(secret.parent)
    (root / "inner.dcm").symlink_to(root / "a.dcm")
    table = manifest(
        root,
        "1\t/a.dcm\tL",
        "2\t../secret/s.dcm\tL",
        "3\tx/../../secret/s.dcm\tL",
        "4\t/link.dcm\tL",
        "5\tlinked/s.dcm\tL",
        "6\tC:\\secret\\s.dcm\tL",
        f"7\t{secret}\tL",
        "8\tgs://b/s.dcm\tL",
        "9\t/inner.dcm\tL",
        "10\tC:/d/t.dcm\tL",
    )
    for source in (root, table):
        found = discover([source])
        assert {file.path.resolve() for file in found.files} == {root / "a.dcm"}
        assert reasons(found) == {
            "../secret/s.dcm": "path_escapes",
            "x/../../secret/s.dcm": "path_escapes",
            "link.dcm": "path_escapes",
            "linked/s.dcm": "path_escapes",
            "gs://b/s.dcm": "path_escapes",
            "s.dcm": "path_escapes",  # an absolute path, which no table may tell
            "t.dcm": "path_escapes",
        }


def test_rows_that_repeat_and_rows_that_disagree(tmp_path: Path) -> None:
    for name in "abc":
        scan(tmp_path / f"{name}.dcm")
    table = manifest(tmp_path, "1\ta.dcm\tL", "1\t/a.dcm\tL", "1\tb.dcm\tL", "2\tb.dcm\tL", "1\tc.dcm\tR")
    for source in (tmp_path, table, f"{tmp_path}/*.dcm"):
        found = discover([source])
        assert names(found) == ["a.dcm", "c.dcm"]
        assert reasons(found) == {"b.dcm": "manifest_disagrees"}
    assert discover([table]).ignored["repeated manifest row"] == 2
    with pytest.raises(UsageError, match="contradict each other"):
        discover([tmp_path / "b.dcm"])


def test_columns_are_read_leniently(tmp_path: Path) -> None:
    scan(tmp_path / "a.dcm")
    columns = " Participant_ID ,FilePath,Laterality,Pixel_Spacing"
    (tmp_path / "list.csv").write_text(f'{columns}\nAI-READI-1001,a.dcm,R,"[0.0039, 0.012]"\n')
    row = discover([tmp_path / "list.csv"]).files[0].row
    assert row is not None
    assert (row.person_id, row.laterality, row.pixel_spacing_mm) == ("1001", "R", (0.0039, 0.012))


def test_accents_may_be_composed_or_not(tmp_path: Path) -> None:
    scan(tmp_path / "a\u0308.dcm")  # as macOS writes it
    manifest(tmp_path, "1\t\u00e4.dcm\tL")
    found = discover([tmp_path])
    assert [file.row is not None for file in found.files] == [True]
    assert not found.refused


def test_every_data_set_below_a_folder_has_its_own_manifest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree(tmp_path / "first")
    scan(tmp_path / "second" / "a.dcm")
    manifest(tmp_path / "second", "77\ta.dcm\tL")
    scan(tmp_path / "second" / "retinal_octa" / "b.dcm")
    manifest(tmp_path / "second" / "retinal_octa", "78\tnever.dcm\tL")  # of another modality
    manifest(tmp_path / "third", "x\ty", columns="other\ttable")
    found = discover([tmp_path])
    people = {file.path.name: file.row.person_id if file.row else "" for file in found.files}
    assert people == {**dict.fromkeys(NAMES, "1234"), "a.dcm": "77", "b.dcm": ""}
    assert reasons(found) == {"first/retinal_oct/absent.dcm": "manifest_row_without_file"}
    assert "has no column 'filepath'" in caplog.text
    assert len(found.participants) == 1


# What lies in trees


def test_archives_are_never_silently_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scan(tmp_path / "a.dcm")
    for name in ("b.zip", "c.TAR.GZ", "._d.zip"):
        (tmp_path / name).write_bytes(b"PK")
    found = discover([tmp_path])
    assert reasons(found) == {"b.zip": "archive_not_expanded", "c.TAR.GZ": "archive_not_expanded"}
    assert "octjepa expand" in next(one.detail for one in found.refused if one.source.name == "b.zip")
    assert "2 archive_not_expanded" in caplog.text
    with pytest.raises(UsageError, match=r"no OCT scan in .*b\.zip\n  1 archive_not_expanded: .* run `octjepa expand`"):
        discover([tmp_path / "b.zip"])


def test_special_files_links_and_loops(tmp_path: Path) -> None:
    scan(tmp_path / "set" / "a.dcm")
    outside = scan(tmp_path / "outside" / "b.dcm")
    inside = tmp_path / "set"
    os.mkfifo(inside / "pipe.dcm")  # opening it would wait for ever
    (inside / "round").symlink_to(inside)
    (inside / "folder").symlink_to(outside.parent)
    (inside / "chosen.dcm").symlink_to(outside)
    (inside / "lost.dcm").symlink_to(tmp_path / "gone")
    (inside / "self.dcm").symlink_to(inside / "self.dcm")
    scan(inside / ".hidden" / "c.dcm")
    found = discover([inside])
    assert names(found) == ["a.dcm"]
    assert found.ignored == {"special file": 1, "linked folder": 2, "hidden folder": 1}
    assert reasons(found) == {
        "chosen.dcm": "path_escapes",
        "lost.dcm": "unreadable_file",
        "self.dcm": "unreadable_file",
    }


def test_odd_names_stay_apart_and_can_be_written(tmp_path: Path) -> None:
    odd = [b"a\xff.dcm", b"a\nb.dcm", b"\x1b[31m.dcm", b"n" * 251 + b".dcm"]
    for name in odd:
        scan(Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)))
    found = discover([tmp_path])
    assert len({file.key for file in found.files}) == 4
    assert all(name.isprintable() and name.encode() for name in names(found))
    assert "a\\nb.dcm" in names(found)
    for file in found.files:
        with file.local() as path:
            assert path.stat().st_size == 132


def test_a_folder_that_may_not_be_listed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scan(tmp_path / "a.dcm")
    scan(tmp_path / "locked" / "b.dcm")
    really = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root, who runs many tests, may list everything
    for source in (tmp_path, f"{tmp_path}/**/*.dcm"):
        found = discover([source])
        assert names(found) == ["a.dcm"]
        assert [(one.source.path.name, one.reason) for one in found.refused] == [("locked", "unreadable_folder")]
        assert "1 unreadable_folder" in caplog.text


def test_a_folder_of_images_is_one_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_images(folder: Path, names: list[str]) -> bool:
        return bool(names) and all(name.endswith(".png") for name in names)

    monkeypatch.setattr(formats, "is_scan_folder", all_images)
    for number in range(3):
        (scan(tmp_path / "1001" / "eye" / f"{number}.png")).write_bytes(bytes(number))
    manifest(tmp_path, "1001\t/1001/eye\tL")
    found = discover([tmp_path])
    assert names(found) == ["1001/eye"]
    (one,) = found.files
    assert one.row is not None
    before = one.state()
    assert before is not None
    assert before[0] == 3
    (tmp_path / "1001" / "eye" / "0.png").write_bytes(b"other")
    assert one.state() != before
    assert found.ignored == {".tsv": 1}


def test_a_source_file_is_known_again(tmp_path: Path) -> None:
    path = scan(tmp_path / "a.dcm")
    (tmp_path / "link.dcm").symlink_to(path)
    (file,) = discover([tmp_path]).files  # the link is the same file
    with file.local() as local:
        assert local.samefile(path)
    assert file.dataset_path.name in {"a.dcm", "link.dcm"}
    assert file.state() == (132, path.stat().st_mtime_ns)
    path.unlink()
    assert file.state() is None


def state_of(path: Path) -> tuple[int, int] | None:
    return SourceFile(path, path.name).state()


def test_a_scan_whose_companion_changes_is_another(tmp_path: Path) -> None:
    folder = tmp_path / "eye"
    folder.mkdir()
    (folder / "1.png").write_bytes(b"picture")
    changed = {
        folder: tmp_path / "eye.json",
        tmp_path / "a.mhd": tmp_path / "voxels.bin",
        tmp_path / "export.xml": tmp_path / "1.png",
        tmp_path / "a.zarr": tmp_path / "a.zarr" / "0" / "0" / "0",
    }
    (tmp_path / "a.mhd").write_bytes(b"ObjectType = Image\nElementDataFile = voxels.bin\n")
    (tmp_path / "export.xml").write_text(r"<HEDX><ExamURL>\\disk\scans\1.png</ExamURL>")
    (tmp_path / "a.zarr" / "0" / "0").mkdir(parents=True)
    (tmp_path / "a.zarr" / ".zgroup").write_text("{}")
    for companion in changed.values():
        companion.write_bytes(b"first")
    before = {path: state_of(path) for path in changed}
    assert all(before.values())
    for companion in changed.values():
        companion.write_bytes(b"second")
    assert [path.name for path, state in before.items() if state_of(path) == state] == []


def test_a_header_names_no_voxels_outside_its_folder() -> None:
    names = [b"voxels.bin", b"sub/v.raw\r", b"../v.raw", b"/etc/passwd", b"C:\\v.raw", b""]
    found = [named_voxel_file(b"NDims = 3\nElementDataFile = " + name + b"\n") for name in names]
    assert found == ["voxels.bin", "sub/v.raw", "", "", "", ""]
    assert named_voxel_file(b"NDims = 3\n") == ""


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_reader_and_search_take_the_same_file_of_voxels(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.mhd"
    header = "NDims = 3\nDimSize = 48 40 6\nElementType = MET_UCHAR\nElementDataFile = größe.raw\n"
    path.write_bytes(header.encode(encoding))
    voxels = tmp_path / "größe.raw"
    voxels.write_bytes((np.arange(6 * 40 * 48) % 251).astype(np.uint8).tobytes())
    assert metaimage.read_metaimage(path).pixels.shape == (6, 40, 48)
    before = state_of(path)
    voxels.write_bytes(b"")
    assert state_of(path) != before


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "cp1252"])
def test_pictures_of_an_export_are_named_in_any_encoding(encoding: str) -> None:
    text = r"<HEDX><ExamURL>\\disk\scans\größe.png</ExamURL><ExamURL>2.TIF</ExamURL>"
    assert pictures_in(text.encode(encoding)) == ["größe.png", "2.TIF"]


def test_an_editors_lock_in_a_folder_of_b_scans_is_left_out(tmp_path: Path) -> None:
    for number in range(8):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / ".#notes.txt").symlink_to("me@host.123:99")
    found = discover([tmp_path])
    assert found.files[0].state() is not None
    assert (found.refused, found.ignored) == ([], {"link to nothing": 1})


# Cost


@pytest.mark.parametrize("source", ["tree", "manifest", "glob", "list"])
def test_the_cost_of_a_file_does_not_depend_on_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """System calls per file, counted: parsing tables and walking may not come back to a file once per other file."""
    calls: Counter[str] = Counter()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*words: Any, **named: Any) -> Any:
            calls[name] += 1
            return call(*words, **named)

        return wrapped

    def cost(files: int) -> Counter[str]:
        root = tmp_path / f"{files:05}"
        rows = []
        for number in range(files):
            scan(root / "retinal_oct" / "set" / f"{number}.dcm")
            rows.append(f"1\t/retinal_oct/set/{number}.dcm\tL")
        table = manifest(root / "retinal_oct", *rows)
        (root / "a.txt").write_text("\n".join(f"retinal_oct/set/{number}.dcm" for number in range(files)))
        given = {"tree": root, "manifest": table, "glob": f"{root}/**/*.dcm", "list": root / "a.txt"}[source]
        calls.clear()
        with monkeypatch.context() as patch:
            for name in ("stat", "lstat", "scandir", "open"):
                patch.setattr(os, name, counted(name, getattr(os, name)))
            assert len(discover([given]).files) == files
        return Counter(calls)

    few, many = cost(20), cost(120)
    depth = len(tmp_path.parts) + 4  # the key of a file resolves its path once
    per_file = {name: (many[name] - few[name]) / 100 for name in many}
    assert per_file.get("stat", 0) <= 3
    assert per_file.get("lstat", 0) <= depth + 1
    assert per_file.get("scandir", 0) == 0


def test_region_words() -> None:
    assert parse_region("maestro2_macula_6x6_octa") == "Macula, 6 x 6"
    assert parse_region("Angio Macula 4.5x4.5 mm") == "Macula, 4.5 x 4.5"
    assert parse_region("Macular Cube 512x128") == "Macula"
    assert parse_region("Optic Disc Cube 200x200") == "Optic Disc"
    assert parse_region("spectralis onh rc hr oct") == "Optic Disc"
    assert parse_region("maestro2 3d wide oct") == "Wide Field"


def test_reason_codes_are_closed_and_documented(root: Path) -> None:
    with pytest.raises(KeyError):
        rejection("made_up", "")
    with pytest.raises(KeyError):
        quarantine_record("f", "", "read", "made_up", "")
    page = (root / "docs" / "ingest.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \|", page, re.MULTILINE))
    assert documented == {code: f"{reason.meaning}" for code, reason in REASONS.items()}
    for source in (root / "src" / "octjepa").rglob("*.py"):
        for code in re.findall(r"rejected\(\s*\"([a-z_]+)\"", source.read_text(encoding="utf-8")):
            assert code in REASONS, f"{source.name} uses {code}"


@pytest.mark.parametrize(
    "copy", ["Copy of scan.dcm", "scan (1).dcm", "scan - Copy.dcm", "backup/scan.dcm", "scan_copy2.dcm"]
)
def test_the_original_is_read_before_its_copy(copy: str, tmp_path: Path) -> None:
    """Of two files with the same pixels the first is stored, and "Copy of scan" comes first in the alphabet."""
    for name in ("scan.dcm", copy, "microscopy.dcm"):
        save(make_dataset(PIXELS), tmp_path / name)
    assert [file.name for file in discover([tmp_path]).files] == ["microscopy.dcm", "scan.dcm", copy]
