"""Small files that unpack to much more: each is refused, and the process that tries takes little memory."""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

LARGE = 640 << 20  # bytes that a bomb unpacks to
ALLOWED = 300 << 20  # bytes that refusing it may take, with NumPy, SciPy, h5py and nibabel imported

CHILD = """
import re, sys
from pathlib import Path
from octjepa.read.reader import read_volume
from octjepa.errors import VolumeRejected
try:
    read_volume(sys.argv[1], spacing_mm=(0.1, 0.004, 0.01))
    reason = "accepted"
except VolumeRejected as error:
    reason = error.reason
# the peak of this program; ru_maxrss also counts the process that started it
peak_kb = int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
print(reason, peak_kb * 1024)
"""


def zeros(head: bytes = b"", count: int = LARGE) -> Iterator[bytes]:
    """`head` and zeros, in pieces."""
    yield head
    block = bytes(1 << 20)
    for _ in range(count >> 20):
        yield block


def packed(pieces: Iterator[bytes], container: int = 15) -> bytes:
    compressor = zlib.compressobj(1, wbits=container)
    return b"".join([*map(compressor.compress, pieces), compressor.flush()])


def zip_member(path: Path, members: dict[str, Iterator[bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, pieces in members.items():
            with archive.open(name, "w", force_zip64=True) as file:
                for piece in pieces:
                    file.write(piece)
    return path


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


SCAN = np.random.default_rng(0).integers(0, 255, (8, 64, 48), np.uint8)


def npz_text(folder: Path) -> Path:
    text = npy_header(f"<U{LARGE // 4}", ())
    return zip_member(folder / "text.npz", {"oct.npy": iter([npy(SCAN)]), "note.npy": zeros(text)})


def npz_header(folder: Path) -> Path:
    return zip_member(folder / "header.npz", {"oct.npy": zeros(b"\x93NUMPY\x02\x00" + struct.pack("<I", LARGE))})


def npz_values(folder: Path) -> Path:
    return zip_member(folder / "values.npz", {"oct.npy": zeros(npy_header("|u1", (40, 4096, 4096)))})


def _mat_element(name: bytes, code: int, shape: tuple[int, ...], stored: int, count: int) -> bytes:
    parts = struct.pack("<4I", 6, 8, code, 0) + struct.pack("<2I", 5, 4 * len(shape))
    parts += struct.pack(f"<{len(shape)}i", *shape).ljust(-(-len(shape) // 2) * 8, b"\0")
    parts += struct.pack("<2I", 1, len(name)) + name.ljust(8, b"\0") + struct.pack("<2I", stored, count)
    return struct.pack("<2I", 14, len(parts) + count) + parts


def mat_text(folder: Path) -> Path:
    from scipy.io import savemat

    savemat(folder / "text.mat", {"oct": SCAN})
    element = packed(zeros(_mat_element(b"note", 4, (1, LARGE // 2), 4, LARGE)))
    with (folder / "text.mat").open("ab") as file:
        file.write(struct.pack("<2I", 15, len(element)) + element)
    return folder / "text.mat"


def mat_values(folder: Path) -> Path:
    element = packed(zeros(_mat_element(b"images", 9, (4096, 4096, 40), 2, LARGE)))
    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    (folder / "values.mat").write_bytes(header + struct.pack("<2I", 15, len(element)) + element)
    return folder / "values.mat"


def hdf5_chunk(folder: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "chunk.mat", "w") as file:
        data = file.create_dataset(
            "images", (8, 64, 48), np.uint8, maxshape=(None, None, None), chunks=(40, 4096, 4096), compression="gzip"
        )
        data.id.write_direct_chunk((0, 0, 0), packed(zeros()))
    content = (folder / "chunk.mat").read_bytes()
    assert content.startswith(b"\x89HDF")
    return folder / "chunk.mat"


def _nifti_head() -> bytes:
    import nibabel

    header = nibabel.Nifti1Header()
    header.set_data_dtype(np.uint8)
    header.set_data_shape((4096, 4096, 40))
    header["vox_offset"], header["magic"] = 352, b"n+1"
    return header.binaryblock + bytes(4)


def nifti_values(folder: Path) -> Path:
    (folder / "scan.nii.gz").write_bytes(packed(zeros(_nifti_head()), 31))
    return folder / "scan.nii.gz"


def nifti_trailer(folder: Path) -> Path:
    import nibabel

    plain = nibabel.Nifti1Image(SCAN.T, np.eye(4)).to_bytes()
    (folder / "tail.nii.gz").write_bytes(gzip.compress(plain[: 352 + SCAN.size - 9]) + packed(zeros(), 31))
    return folder / "tail.nii.gz"


def metaimage_values(folder: Path) -> Path:
    content = packed(zeros())
    header = "ObjectType = Image\nNDims = 3\nBinaryData = True\nCompressedData = True\n"
    header += f"CompressedDataSize = {len(content)}\nDimSize = 4096 4096 40\nElementType = MET_UCHAR\n"
    (folder / "scan.mha").write_bytes(header.encode() + b"ElementDataFile = LOCAL\n" + content)
    return folder / "scan.mha"


def tiff_strip(folder: Path) -> Path:
    import tifffile

    path = folder / "strip.tif"
    strips = [packed(zeros()), *[zlib.compress(frame.tobytes()) for frame in SCAN[1:]]]
    with tifffile.TiffWriter(path) as writer:
        for strip in strips:
            writer.write(iter([strip]), shape=(64, 48), dtype=np.uint8, compression="zlib", rowsperstrip=64)
    return path


BOMBS: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "a text of one value in an .npz": (npz_text, {"accepted", "not_b_scans", "axes_ambiguous", "no_tissue"}),
    "the header of an .npy in an .npz": (npz_header, {"broken_header"}),
    "values of an .npz": (npz_values, {"size_implausible"}),
    "a text in a .mat": (mat_text, {"accepted", "not_b_scans", "axes_ambiguous", "no_tissue"}),
    "values of a .mat": (mat_values, {"size_implausible"}),
    "a chunk of HDF5": (hdf5_chunk, {"size_implausible", "unsupported_pixels"}),
    "voxels of a .nii.gz": (nifti_values, {"size_implausible"}),
    "what follows the voxels of a .nii.gz": (nifti_trailer, {"axes_ambiguous", "unsupported_pixels", "not_b_scans"}),
    "voxels of an .mha": (metaimage_values, {"size_implausible"}),
    "a strip of a TIFF": (tiff_strip, {"axes_ambiguous", "unsupported_pixels", "not_b_scans"}),
}


def tried(path: Path, child: str = CHILD) -> tuple[str, int]:
    """(reason, peak memory in bytes) of reading a file in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", child, str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    reason, peak = done.stdout.split()[-2:] if done.stdout else (f"ended with {done.returncode}", "0")
    return reason, int(peak)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_takes_little_memory(tmp_path: Path, kind: str) -> None:
    build, reasons = BOMBS[kind]
    path = build(tmp_path)
    assert path.stat().st_size < LARGE // 50
    reason, peak = tried(path)
    assert reason in reasons
    assert peak < ALLOWED, f"{peak >> 20} MiB"


def xml_tags(folder: Path) -> Path:
    path = folder / "export.xml"
    path.write_bytes(b"<HEDX><BODY><Series>" + b"<a/>" * 8_000_000 + b"</Series></BODY></HEDX>")
    return path


def xml_attributes(folder: Path) -> Path:
    path = folder / "export.xml"
    names = b" ".join(b'a%x=""' % number for number in range(3_000_000))
    path.write_bytes(b"<HEDX><BODY><Series " + names + b"></Series></BODY></HEDX>")
    return path


@pytest.mark.parametrize("bomb", [xml_tags, pytest.param(xml_attributes, marks=pytest.mark.slow)])
def test_an_xml_of_very_many_parts_is_refused_before_it_is_parsed(tmp_path: Path, bomb: Callable[[Path], Path]) -> None:
    reason, peak = tried(bomb(tmp_path))
    assert reason == "size_implausible"
    assert peak < ALLOWED


LABELS = CHILD.replace("read_volume(sys.argv[1], spacing_mm=(0.1, 0.004, 0.01))", "labels(Path(sys.argv[1]))").replace(
    "from octjepa.read.reader import read_volume",
    """from octjepa.errors import UsageError
from octjepa.tasks.labels.label_files import LabelFolder
def labels(path):
    try:
        LabelFolder(path.parent).names(path)
    except UsageError as error:
        raise VolumeRejected(str(error).partition(": ")[2].partition(":")[0].replace(" ", "_"), "")""",
)


@pytest.mark.slow
def test_label_archives_are_checked_before_they_are_read(tmp_path: Path) -> None:
    header = npy_header("|u1", (5 << 30, 1, 1))
    members = {"labels.npy": zeros(header), "names.npy": iter([npy(np.array(["a"]))])}
    path = zip_member(tmp_path / "labels.npz", members)
    reason, peak = tried(path, LABELS)
    assert reason == "its_arrays"
    assert peak < 3 * ALLOWED  # with torch imported; the file declares 5 GiB


def test_an_archive_of_very_many_members_is_refused_before_they_are_read(tmp_path: Path) -> None:
    member = npy(np.zeros(1))
    path = zip_member(tmp_path / "many.npz", {f"m{number}.npy": iter([member]) for number in range(5000)})
    assert tried(path)[0] == "unsupported_pixels"
