"""What a data manager finds in the ledger and the counts: links, images beside scans, empty files, rows and paths."""

from __future__ import annotations

from pathlib import Path

from octjepa.ingest import Discovery, discover


def scan(path: Path, content: bytes = bytes(128) + b"DICM") -> Path:
    """A file, without `content` what is recognised as DICOM."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def manifest(
    root: Path, *rows: str, name: str = "manifest.tsv", columns: str = "person_id\tfilepath\tlaterality"
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("\n".join([columns, *rows]) + "\n")
    return root / name


def names(found: Discovery) -> list[str]:
    return [file.name for file in found.files]


def reasons(found: Discovery) -> dict[str, str]:
    return {one.source.name: one.reason for one in found.refused}


def test_of_a_file_and_a_link_to_it_the_file_is_read(tmp_path: Path) -> None:
    real = scan(tmp_path / "b" / "P5_OD.dcm")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "case1.dcm").symlink_to(real)
    for sources in ([tmp_path], [f"{tmp_path}/*/*.dcm"], [tmp_path / "a" / "case1.dcm", real]):
        found = discover(sources)
        assert [file.path for file in found.files] == [real]
        assert found.ignored == {"link to a file that is read": 1}
    assert not discover([tmp_path / "b", real]).ignored  # found twice, by one name
    assert names(discover([tmp_path / "a"])) == ["case1.dcm"]  # the file itself lies elsewhere
    manifest(tmp_path, "1\ta/case1.dcm\tL")
    assert names(discover([tmp_path])) == ["a/case1.dcm"]  # the row speaks of it by this name
