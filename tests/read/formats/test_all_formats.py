"""One eye through every open format is one scan; what a format does not contain is not invented."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import h5py
import numpy as np
import pytest
from scipy.io import savemat

import octjepa
from eye_files import phantom, write_images, write_sidecar, write_tiff, write_voxels
from oct_dicom import make_dataset, save
from octjepa.convert.arrays import write_zarr
from octjepa.errors import VolumeRejected, install_command
from octjepa.ingest import SourceFile
from octjepa.read.formats import all_formats, is_scan_folder, recognise, suffixes
from octjepa.read.reader import describe_file, read_volume

PIXELS, SPACING = phantom()


def write_dicom(folder: Path) -> Path:
    data = make_dataset(PIXELS, SPACING[0])
    data.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing = list(SPACING[1:])
    return save(data, folder / "scan.dcm")


def write_npy(folder: Path) -> Path:
    np.save(folder / "scan.npy", PIXELS)
    return folder / "scan.npy"


def write_npz(folder: Path) -> Path:
    np.savez_compressed(folder / "scan.npz", oct_bscans=PIXELS, spacing_mm=np.array(SPACING))
    return folder / "scan.npz"


def write_mat(folder: Path) -> Path:
    savemat(folder / "scan.mat", {"images": PIXELS.transpose(1, 2, 0).astype(float), "spacing_mm": np.array(SPACING)})
    return folder / "scan.mat"


def write_mat73(folder: Path) -> Path:
    path = folder / "scan.mat"
    with h5py.File(path, "w", userblock_size=512) as file:
        file["images"] = PIXELS.transpose(1, 2, 0).T  # MATLAB writes the first axis last
        file["spacing_mm"] = np.array(SPACING)[:, None]
    with path.open("r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM")
    return path


# format, how it is written, whether its spacing has to be given next to the file
WRITERS: dict[str, tuple[str, Callable[[Path], Path], bool]] = {
    "dicom": ("dicom", write_dicom, False),
    "nii": ("nifti", lambda folder: write_voxels(folder / "scan.nii", PIXELS, SPACING), False),
    "nii.gz": ("nifti", lambda folder: write_voxels(folder / "scan.nii.gz", PIXELS, SPACING), False),
    "mhd": ("metaimage", lambda folder: write_voxels(folder / "scan.mhd", PIXELS, SPACING), False),
    "mha": ("metaimage", lambda folder: write_voxels(folder / "scan.mha", PIXELS, SPACING), False),
    "npz": ("npz", write_npz, False),
    "mat": ("mat", write_mat, False),
    "mat73": ("mat", write_mat73, False),
    "npy": ("npy", write_npy, True),
    "tiff": ("tiff", lambda folder: write_tiff(folder / "scan.tif", PIXELS), True),
    "images": ("images", lambda folder: write_images(folder / "scan", PIXELS), True),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_one_eye_through_every_format_is_one_scan(kind: str, tmp_path: Path) -> None:
    format, write, needs_spacing = WRITERS[kind]
    path = write(tmp_path)
    assert recognise(path) == format
    volume = read_volume(path, spacing_mm=SPACING if needs_spacing else None)
    assert volume.format == format
    assert np.array_equal(volume.pixels, PIXELS)
    assert volume.spacing_mm == pytest.approx(SPACING, rel=1e-6)
    source = "option" if needs_spacing else "shared" if kind == "dicom" else "header"
    assert volume.provenance["depth"] == volume.provenance["column"] == source
    assert "depth_flipped" not in volume.notes
    assert not any(note.startswith("axes_stored") for note in volume.notes) or kind.startswith("mat")


@pytest.mark.parametrize("kind", [kind for kind, (_, _, needs) in WRITERS.items() if needs])
def test_a_format_without_spacing_needs_a_sidecar_or_the_option(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind][1](tmp_path)
    with pytest.raises(VolumeRejected, match=r"spacing_unknown: .*--spacing"):
        read_volume(path)
    assert describe_file(path)["reasons"][0]["reason"] == "spacing_unknown"
    assert describe_file(path, SPACING)["kind"] == "volume"
    write_sidecar(
        tmp_path / "scan.json",
        spacing_mm=SPACING,
        laterality="OS",
        person_id="P017",
        device="Cirrus HD-OCT",
        labels={"dr": 1, "stage": "mild"},
        exported_by="somebody",
    )
    volume = read_volume(path)
    assert volume.spacing_mm == SPACING
    assert set(volume.provenance.values()) == {"sidecar"}
    assert (volume.laterality, volume.person_id, volume.device) == ("OS", "P017", "zeiss_cirrus")
    assert volume.labels == {"dr": 1.0, "stage": "mild"}
    assert {"spacing_from_sidecar", "sidecar_keys_left=1"} <= set(volume.notes)
    assert read_volume(path, spacing_mm=(0.05, 0.002, 0.02)).spacing_mm == (0.05, 0.002, 0.02)


def test_a_broken_sidecar_is_refused_and_a_strange_one_is_ignored(tmp_path: Path) -> None:
    path = write_npy(tmp_path)
    for text in ("{", '{"spacing_mm": "0.1"}', '{"spacing_mm": [0.1, NaN, 0.1]}', "[" * 100_000):
        (tmp_path / "scan.json").write_text(text)
        with pytest.raises(VolumeRejected, match="broken_header: its JSON file"):
            read_volume(path)
    write_sidecar(tmp_path / "scan.json", operator="somebody")
    assert read_volume(path, spacing_mm=SPACING).spacing_mm == SPACING
    (tmp_path / "scan.json").write_text("[1, 2]")
    with pytest.raises(VolumeRejected, match="broken_header: its JSON file"):
        read_volume(path)


def test_the_scale_of_an_ome_zarr_image_multiplies_that_of_its_array(tmp_path: Path) -> None:
    path = tmp_path / "scan.zarr"
    write_zarr(path, PIXELS, (2 * SPACING[0], 2 * SPACING[1], 2 * SPACING[2]))
    attributes = json.loads((path / ".zattrs").read_text())
    attributes["multiscales"][0]["coordinateTransformations"] = [{"type": "scale", "scale": [0.5, 0.5, 0.5]}]
    (path / ".zattrs").write_text(json.dumps(attributes))
    assert read_volume(path).spacing_mm == pytest.approx(SPACING)


def test_what_is_missing_or_in_the_wrong_order_is_named(tmp_path: Path) -> None:
    path = write_npy(tmp_path)
    with pytest.raises(VolumeRejected, match="no plausible spacing of slice, depth, column: no source names one"):
        read_volume(path)
    write_sidecar(tmp_path / "scan.json", spacing_mm=(0.0078, 0.26, 0.04))
    with pytest.raises(VolumeRejected) as refused:
        read_volume(path)
    assert "sidecar (slice, depth, column) = (0.0078, 0.26, 0.04)" in refused.value.detail
    (tmp_path / "scan.json").write_text('{"spacing_mm": [0.1, 0.2]}')
    with pytest.raises(VolumeRejected, match=r"spacing_mm as three numbers \(slice, depth, column"):
        read_volume(path)


@pytest.mark.parametrize("suffix", ["nii", "nii.gz", "mha", "npy", "npz", "mat", "vol", "fda", "e2e", "oct"])
def test_an_html_page_is_called_one(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"P8_OD.{suffix}"
    for text in ("<!DOCTYPE html><html><body>Please log in</body></html>", "\n<HTML>" + 400 * " "):
        path.write_text(text)
        with pytest.raises(VolumeRejected, match="unknown_format: an HTML page"):
            read_volume(path)


def test_a_short_file_that_is_no_nifti(tmp_path: Path) -> None:
    path = tmp_path / "P8_OD.nii"
    path.write_text("not found")
    with pytest.raises(VolumeRejected, match="unknown_format: not a NIfTI file"):
        read_volume(path)


def test_content_goes_before_the_suffix(tmp_path: Path) -> None:
    for kind in ("dicom", "nii", "nii.gz", "mha", "npy", "npz", "mat", "mat73", "tiff"):
        folder = tmp_path / kind
        folder.mkdir()
        format, write, _ = WRITERS[kind]
        path = write(folder)
        plain = path.rename(folder / "scan_without_suffix")
        assert recognise(plain) == format, kind
        assert np.array_equal(read_volume(plain, spacing_mm=SPACING).pixels, PIXELS), kind
    lies = write_npy(tmp_path).rename(tmp_path / "scan.dcm")
    assert recognise(lies) == "npy"


def test_empty_and_foreign_files_have_their_reason(tmp_path: Path) -> None:
    for suffix in sorted(suffixes() - {".tif", ".tiff"}):
        (tmp_path / f"scan{suffix}").write_bytes(b"")
        if recognise(tmp_path / f"scan{suffix}") is not None:
            with pytest.raises(VolumeRejected, match="empty_file"):
                read_volume(tmp_path / f"scan{suffix}")
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "folder").mkdir()
    assert recognise(tmp_path / "notes.txt") is None
    for name in ("notes.txt", "folder"):
        with pytest.raises(VolumeRejected, match="unknown_format"):
            read_volume(tmp_path / name)
    (tmp_path / "nothing").write_bytes(b"")
    with pytest.raises(VolumeRejected, match="empty_file"):
        read_volume(tmp_path / "nothing")


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz", ".mhd", ".mha", ".npy", ".npz", ".mat"])
def test_noise_is_refused_with_a_reason_that_is_no_fault_of_the_reader(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"scan{suffix}"
    path.write_bytes(np.random.default_rng(0).bytes(5000))
    with pytest.raises(VolumeRejected) as caught:
        read_volume(path)
    assert caught.value.reason in {"broken_header", "truncated", "unsupported_pixels"}


def test_the_missing_library_of_an_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scan.mat"
    path.write_bytes(b"MATLAB 7.3 MAT-file" + bytes(1000))
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    message = f"no_decoder: h5py is not installed: {install_command('formats')}"
    with pytest.raises(VolumeRejected, match=re.escape(message)):
        read_volume(path)


def test_every_reader_of_the_registry_exists() -> None:
    for format in all_formats():
        module, _, function = format.reader.partition(":")
        assert callable(getattr(import_module(module), function)), format.name


def test_another_package_adds_a_format_by_an_entry_point(tmp_path: Path) -> None:
    (tmp_path / "own-1.0.dist-info").mkdir()
    (tmp_path / "own-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (tmp_path / "own-1.0.dist-info" / "entry_points.txt").write_text("[octjepa.readers]\nown = own:FORMAT\n")
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\n"
        "from octjepa.read.formats import Format\n"
        "from octjepa.read.formats.arrays import read_npy\n"
        "FORMAT = Format('own', ('.own',), lambda path, head: head.startswith(b'OWN'), 'own:read_own')\n"
        "def read_own(path): return replace(read_npy(path.with_suffix('.npy')), format='own')\n"
    )
    write_npy(tmp_path)
    (tmp_path / "scan.own").write_bytes(b"OWN")
    script = "import sys, octjepa; print(octjepa.read_volume(sys.argv[1], spacing_mm=(0.26, 0.0078, 0.04)).format)"
    paths = os.pathsep.join([str(tmp_path), str(Path(octjepa.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "scan.own")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "own", done.stderr


def test_a_folder_in_a_bucket_is_recognised_by_its_names_alone() -> None:
    names = [f"b{number}.png" for number in range(1, 20)]
    nowhere = Path("no_such_folder_here")
    assert is_scan_folder(nowhere, names)
    assert is_scan_folder(nowhere, [*names, "b.json", "mask.npy"])
    assert not is_scan_folder(nowhere, [*names, "scan.dcm"])
    assert not is_scan_folder(nowhere, names[:3])


def test_a_changed_file_beside_a_scan_is_noticed(tmp_path: Path) -> None:
    for kind, other in (("npy", "scan.json"), ("mhd", "scan.raw")):
        source = SourceFile(WRITERS[kind][1](tmp_path), "scan")
        (tmp_path / other).touch()
        before = source.state()
        assert source.state() == before
        os.utime(tmp_path / other, ns=(1, 1))
        assert source.state() != before, kind
    dicom = SourceFile(WRITERS["dicom"][1](tmp_path), "scan")
    assert dicom.state() == (dicom.path.stat().st_size, dicom.path.stat().st_mtime_ns)
