"""DICOM files from outside are opened in one place, which allocates no more than the file can hold."""

from __future__ import annotations

import ast
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian

from oct_dicom import make_dataset, retina, save
from octjepa.errors import VolumeRejected
from octjepa.ingest.audit import personal_fields_in_file
from octjepa.read import memory_budget
from octjepa.read.dicom_file import read_header
from octjepa.read.dicom_series import series_facts
from octjepa.read.personal_data import read_stated_person
from octjepa.read.reader import read_volume
from octjepa.tasks.labels.dicom_seg import is_segmentation

MIB = 1 << 20
# pydicom's own ways to open a file, which inflate and allocate without limits.
UNGUARDED = {"dcmread", "read_partial", "segread", "read_file_meta_info"}
# Files that octjepa itself wrote a moment ago.
OWN_FILES = {"doctor/install.py", "bench/ingest.py"}


@pytest.mark.slow
def test_no_module_opens_dicom_with_pydicoms_own_functions(root: Path) -> None:
    package = root / "src" / "octjepa"
    found = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in sorted(package.rglob("*.py"))
        if not path.as_posix().endswith(tuple(OWN_FILES))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in UNGUARDED
    ]
    assert found == []


def deflated_bomb(path: Path, kind: str, mebibytes: int = 300) -> Path:
    """A deflated file of some kilobytes whose last element before the pixel data is zeros; its meta header varies."""
    ds = make_dataset(retina(4))
    ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    plain = save(ds, path).read_bytes()
    start = plain.index(b"\x08\0\x16\0UI")  # the first element of the data set
    body = plain[start:]
    at = body.index(b"\x28\0\x02\0US")  # SamplesPerPixel
    zeros = mebibytes * MIB
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(body[:at] + b"\x27\0\x10\0OB\0\0" + struct.pack("<I", zeros))
    for _ in range(mebibytes):
        packed += packer.compress(bytes(MIB))
    packed += packer.compress(body[at:]) + packer.flush()
    syntax = DeflatedExplicitVRLittleEndian.encode()
    element = b"\x02\0\x10\0UI" + struct.pack("<H", len(syntax)) + syntax
    before = {
        "group length": b"\x02\0\0\0UL\x04\0" + struct.pack("<I", len(element)),
        "no group length": b"",
        "long meta header": b"\x02\0\x01\0OB\0\0" + struct.pack("<I", 1 << 17) + bytes(1 << 17),
        "wrong group length": b"\x02\0\0\0UL\x04\0" + struct.pack("<I", 4),
    }[kind]
    path.write_bytes(bytes(128) + b"DICM" + before + element + packed)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["group length", "no group length", "long meta header", "wrong group length"])
def test_a_deflated_bomb_is_refused_below_the_budget(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "memory_limit_bytes", lambda: 256 * MIB)
    monkeypatch.setattr(memory_budget, "LEAST_BYTES", 64 * MIB)
    bomb = deflated_bomb(tmp_path / "bomb.dcm", kind)
    assert bomb.stat().st_size < MIB
    tracemalloc.start()
    with pytest.raises(VolumeRejected, match="size_implausible"):
        read_volume(bomb)
    # The parent of an ingest looks for names, series and labels in files that a worker has not read.
    assert read_stated_person(bomb)[:2] == ("Doe^Jane", "19500101")
    series_facts(bomb)
    personal_fields_in_file(bomb)
    assert not is_segmentation(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 250 * MIB


def test_a_deflated_file_is_read_as_before(tmp_path: Path) -> None:
    pixels = retina()
    ds = make_dataset(pixels)
    ds.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    path = save(ds, tmp_path / "scan.dcm")
    assert (read_volume(path).pixels == pixels).all()
    assert read_stated_person(path)[:2] == ("Doe^Jane", "19500101")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(VolumeRejected, match="truncated"):
        read_volume(path)


def test_meta_information_without_an_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.dcm"
    element = b"\x02\0\x02\0OB\0\0" + struct.pack("<I", 1 << 20) + bytes(1 << 20)
    path.write_bytes(bytes(128) + b"DICM" + element * 3)
    with pytest.raises(VolumeRejected, match=r"broken_header: .*longer than 1 MiB"):
        read_volume(path)


def test_an_element_that_announces_more_than_the_file_holds_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "scan.dcm"
    whole = save(make_dataset(retina(4)), path).read_bytes()
    at = whole.index(b"\x28\0\x02\0US")
    path.write_bytes(whole[:at] + b"\x27\0\x10\0OB\0\0" + struct.pack("<I", 0xFFFFFFF0) + whole[at:])
    tracemalloc.start()
    with pytest.raises(VolumeRejected):
        read_volume(path)
    read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 50 * MIB
    tracemalloc.stop()
