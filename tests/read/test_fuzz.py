"""A short run of the fuzzer, and the damage that longer runs have found to be more than the readers could bear."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from oct_dicom import make_dataset, retina, save
from octjepa.errors import VolumeRejected
from octjepa.read.reader import read_volume


@pytest.fixture
def fuzz(root: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(root / "tests" / "stress"))
    import fuzz_ingest

    yield fuzz_ingest
    for name in ("fuzz_ingest", "fuzz_cases", "fuzz_content"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_damaged_files_are_read_as_they_were_or_refused(fuzz, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The same verdicts as in worker processes, whose limits of time and memory the full run has."""
    results = [fuzz.run_case(number, tmp_path) for number in range(100)]
    faults = [result for result in results if result["verdict"] in fuzz.FAULTS]
    assert faults == []
    verdicts = Counter(result["verdict"] for result in results)
    assert verdicts["same"] > 18
    assert verdicts["refused"] > 18
    assert verdicts["content_right"] > 4


GARBLED_ENDS = (
    1788,
    4789,
    4958,
    5396,
    5739,
    6780,
    7508,
    8660,
)  # a run of 10,000 had these frames dropped as fundus pictures


@pytest.mark.slow
def test_a_garbled_end_frame_is_dropped_as_no_picture(fuzz, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert [fuzz.run_case(number, tmp_path)["verdict"] for number in GARBLED_ENDS] == ["same"] * len(GARBLED_ENDS)


@pytest.mark.slow
def test_a_shuffle_that_leaves_some_neighbours_together_is_noted(fuzz, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert fuzz.run_case(9335, tmp_path)["verdict"] == "content_right"


CONTENT = (
    "swapped",
    "shuffled",
    "repeated",
    "one position",
    "encoded again",
    "cropped",
    "upside down",
    "mirrored",
    "picture first",
    "instrument",
    "many eyes",
    "cornea",
    "rodent",
)


@pytest.mark.parametrize("kind", CONTENT)
def test_changed_content_is_refused_or_noted_for_what_it_is(fuzz, kind: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    import random

    from fuzz_cases import Base, Case
    from fuzz_content import KINDS, content_case

    assert kind in KINDS
    what, content, expected = content_case(random.Random(f"test {kind}"), kind)
    result = fuzz.run_content(Case(0, Base(kind, content, ".dcm"), what, content, (0, 0), expected), tmp_path)
    assert result["verdict"] == "content_right", result


def test_a_wrong_verdict_on_content_is_a_fault(fuzz) -> None:  # type: ignore[no-untyped-def]
    from fuzz_content import Expected

    shuffled = Expected(frozenset({"frames_unrelated"}), refused=True)
    assert shuffled.is_right("frames_unrelated", (), ())
    assert not shuffled.is_right("no_tissue", (), ())
    assert not shuffled.is_right("", (), (8, 9, 9))
    noted = Expected(note="columns_mirrored", shape=(8, 9, 9))
    assert noted.is_right("", ("columns_mirrored=8",), (8, 9, 9))
    assert not noted.is_right("", (), (8, 9, 9))
    assert not noted.is_right("", ("columns_mirrored=8",), (7, 9, 9))


def test_cases_are_the_same_every_time(fuzz) -> None:  # type: ignore[no-untyped-def]
    bases = fuzz.bases()
    again = [*fuzz.dicom_bases()]
    assert [base.content for base in again] == [base.content for base in bases[: len(again)]]
    one, two = fuzz.make_case(17, bases), fuzz.make_case(17, bases)
    assert (one.what, one.content) == (two.what, two.content)


def test_the_check_finds_geometry_that_nobody_stated(fuzz, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The same damage, once believed and once not: what the reader says is set by hand."""
    from dataclasses import replace
    from io import BytesIO

    from pydicom import dcmread

    base = fuzz.bases()[0]
    truth = fuzz._truth(0)
    pixels_hit = fuzz.Case(0, base, "by hand", base.content[:-5] + b"abcde", (len(base.content) - 5, len(base.content)))
    assert fuzz.evaluate(pixels_hit, truth, truth) == "same"
    wider = replace(truth, spacing_mm=(0.05, 0.0026, 0.0234))
    assert fuzz.evaluate(pixels_hit, wider, truth) == "changed_geometry"
    assert fuzz.evaluate(pixels_hit, replace(truth, pixels=truth.pixels[:-1].copy()), truth) == "changed_geometry"

    data = dcmread(BytesIO(base.content))
    data.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing = [0.0026, 0.0234]
    buffer = BytesIO()
    data.save_as(buffer)
    edited = fuzz.Case(0, base, "by hand", buffer.getvalue(), (0, 1))
    assert fuzz.evaluate(edited, wider, truth) == "as_said"
    assert fuzz.evaluate(edited, replace(truth, spacing_mm=(0.05, 0.0026, 0.03)), truth) == "changed_geometry"
    assert fuzz.evaluate(edited, replace(truth, spacing_mm=(0.1, 0.0026, 0.0234)), truth) == "changed_geometry"
    voxels = fuzz.Case(0, next(b for b in fuzz.bases() if b.name == "nifti"), "by hand", b"", (400, 500))
    assert fuzz.evaluate(voxels, wider, truth) == "changed_geometry"


def test_an_element_that_announces_gigabytes_is_not_allocated(tmp_path: Path) -> None:
    """An implausible length in a small file: pydicom asks for all of it at once."""
    data = make_dataset(retina())
    data.ImageComments = "x" * 64
    path = save(data, tmp_path / "a.dcm")
    content = path.read_bytes()
    at = content.index(b"\x20\x00\x00\x40LT") + 4
    path.write_bytes(content[:at] + b"UN\0\0" + (0xF0000000).to_bytes(4, "little") + content[at + 4 :])
    tracemalloc.start()
    try:
        with pytest.raises(VolumeRejected, match="truncated"):
            read_volume(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_functional_group_that_is_a_text_is_silent(tmp_path: Path) -> None:
    from pydicom.dataelem import DataElement

    data = make_dataset(retina())
    for group in data.PerFrameFunctionalGroupsSequence:
        group[0x00209113] = DataElement(0x00209113, "LO", "a text")
    volume = read_volume(save(data, tmp_path / "a.dcm"))
    assert volume.provenance["slice"] != "positions"
    assert np.isclose(volume.spacing_mm[0], 0.05)


@pytest.mark.parametrize("packed", [False, True])
def test_a_matlab_array_that_claims_gigabytes_allocates_nothing(tmp_path: Path, packed: bool) -> None:
    """Length of the values in the array's own tag: 2 GiB in a file of some kilobytes."""
    import struct
    import zlib

    from scipy.io import savemat

    path = tmp_path / "scan.mat"
    pixels = np.random.default_rng(0).integers(0, 255, (64, 48, 8), np.uint8)
    savemat(path, {"images": pixels})
    content = bytearray(path.read_bytes())
    location = content.index(struct.pack("<I", pixels.size), 140)
    struct.pack_into("<I", content, location, 0x80001800)
    if packed:
        stream = zlib.compress(bytes(content[128:]))
        content[128:] = struct.pack("<II", 15, len(stream)) + stream
    path.write_bytes(content)
    read_volume_once = _refused(path)  # SciPy and NumPy imported
    tracemalloc.start()
    again = _refused(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read_volume_once == again == "truncated"
    assert peak < 8 << 20


def _refused(path: Path) -> str:
    with pytest.raises(VolumeRejected) as refused:
        read_volume(path, spacing_mm=(0.1, 0.004, 0.01))
    return refused.value.reason


@pytest.mark.parametrize("packed", [False, True])
def test_lengths_of_whole_matlab_files_are_let_through(tmp_path: Path, packed: bool) -> None:
    from scipy.io import savemat

    path = tmp_path / "scan.mat"
    constant = np.zeros((256, 256, 64), np.uint8)  # packed as tightly as deflate can
    savemat(path, {"images": constant, "eye": "OD", "n": 3.0, "cells": [[1], "a"]}, do_compression=packed)
    assert _refused(path) == "unsupported_pixels"  # every voxel has the same value: the lengths were let through
