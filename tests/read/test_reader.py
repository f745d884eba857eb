"""Any OPT file becomes the right volume, or the right reason."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import Dataset
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLSLossless,
    RLELossless,
)

from oct_dicom import encode, make_dataset, put_frames, retina, save, use_syntax
from octjepa.errors import UsageError, VolumeRejected
from octjepa.read.reader import describe_file, read_volume
from octjepa.read.single_bscan import read_bscan

PIXELS = retina()


def reason_of(path: Path) -> str:
    with pytest.raises(VolumeRejected) as caught:
        read_volume(path)
    for secret in ("Doe", "Jane", "19500101"):
        assert secret not in str(caught.value)
    return caught.value.reason


@pytest.mark.parametrize(
    ("syntax", "tolerance"),
    [
        (ExplicitVRLittleEndian, 0),
        (DeflatedExplicitVRLittleEndian, 0),
        (RLELossless, 0),
        (JPEG2000Lossless, 0),
        (JPEGLSLossless, 0),
        (JPEGBaseline8Bit, 12),
    ],
)
def test_every_transfer_syntax_gives_the_same_pixels(syntax: UID, tolerance: int, tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    use_syntax(ds, PIXELS, syntax)
    volume = read_volume(save(ds, tmp_path / "scan.dcm"))
    assert np.abs(volume.pixels.astype(int) - PIXELS).max() <= tolerance
    assert volume.spacing_mm == (0.05, 0.0026, 0.0117)
    assert (volume.person_id, volume.laterality, volume.device) == ("1234", "OD", "topcon_maestro2")


def test_one_scan_in_two_syntaxes_is_one_scan(tmp_path: Path) -> None:
    native, packed = make_dataset(PIXELS), make_dataset(PIXELS)
    use_syntax(packed, PIXELS, RLELossless)
    hashes = {read_volume(save(ds, tmp_path / f"{i}.dcm")).content_hash for i, ds in enumerate((native, packed))}
    assert len(hashes) == 1


def test_deep_signed_inverted_and_coloured_greys(tmp_path: Path) -> None:
    twelve = PIXELS.astype(np.uint16) * 16
    volume = read_volume(save(make_dataset(twelve), tmp_path / "a.dcm"))
    assert "scaled_from_12_bit" in volume.notes
    assert np.abs(volume.pixels.astype(int) - PIXELS).max() <= 1

    signed = read_volume(save(make_dataset(PIXELS.astype(np.int16) - 100), tmp_path / "b.dcm"))
    assert "signed" in signed.notes
    assert np.abs(signed.pixels.astype(int) - (PIXELS.astype(int) - PIXELS.min())).max() <= 1

    ds = make_dataset(255 - PIXELS)
    ds.PhotometricInterpretation = "MONOCHROME1"
    inverted = read_volume(save(ds, tmp_path / "c.dcm"))
    assert "inverted" in inverted.notes
    assert np.array_equal(inverted.pixels, PIXELS)

    intensities = read_volume(save(make_dataset(np.repeat(PIXELS[..., None], 3, -1)), tmp_path / "d.dcm"))
    assert intensities.notes[0] == "rgb_to_grey"
    assert np.array_equal(intensities.pixels, PIXELS)

    tinted = np.repeat(PIXELS.astype(np.uint16)[..., None] * 256, 3, -1)
    tinted[..., 1] += 40  # of 65535: far less than one level of 8 bits
    intensities = read_volume(save(make_dataset(tinted), tmp_path / "tinted.dcm"))
    assert "colour_dropped" not in intensities.notes
    assert np.abs(intensities.pixels.astype(int) - PIXELS).max() <= 1
    tinted[..., 1] //= 2
    with pytest.raises(VolumeRejected, match="of the pixels are coloured"):
        read_volume(save(make_dataset(tinted), tmp_path / "tinted.dcm"))

    ds = make_dataset(PIXELS)
    ds.RescaleSlope, ds.RescaleIntercept = 2, -5
    assert "rescaled" in read_volume(save(ds, tmp_path / "e.dcm")).notes

    padded = twelve.astype(np.int16)
    padded[:, :3] = -32768  # what PixelPaddingValue usually is
    volume = read_volume(save(make_dataset(padded), tmp_path / "f.dcm"))
    assert {"scaled_from_12_bit", "fill_value"} <= set(volume.notes)
    assert np.abs(volume.pixels.astype(int) - PIXELS)[:, 3:].max() <= 1
    assert not volume.pixels[:, :3].any()


def test_one_broken_frame_is_a_recorded_gap_and_two_are_too_many(tmp_path: Path) -> None:
    frames = encode(PIXELS, JPEG2000Lossless)
    for broken, reason in (([4], None), ([4, 5], "frames_broken"), ([2, 7], "frames_broken")):
        ds = make_dataset(PIXELS)
        ds.file_meta.TransferSyntaxUID = JPEG2000Lossless
        put_frames(ds, [b"\x00" * 64 if i in broken else frame for i, frame in enumerate(frames)])
        path = save(ds, tmp_path / f"{broken}.dcm")
        if reason:
            assert reason_of(path) == reason
            continue
        volume = read_volume(path)
        assert "gap_frames=1" in volume.notes
        middle = (PIXELS[3].astype(int) + PIXELS[5]) // 2
        assert np.array_equal(volume.pixels[4], middle)
        assert np.array_equal(volume.pixels[3], PIXELS[3])


@pytest.mark.parametrize("has_bot", [True, False])
def test_frame_count_comes_from_the_data(has_bot: bool, tmp_path: Path) -> None:
    frames = encode(PIXELS, JPEG2000Lossless)
    for declared, outcome in ((10, "good"), (3, "corrected"), (0, "corrected"), (12, "frames_missing")):
        ds = make_dataset(PIXELS)
        ds.file_meta.TransferSyntaxUID = JPEG2000Lossless
        put_frames(ds, frames, has_bot)
        ds.NumberOfFrames = declared
        path = save(ds, tmp_path / f"{declared}.dcm")
        if outcome == "frames_missing":
            assert reason_of(path) == outcome
        else:
            volume = read_volume(path)
            assert volume.shape == PIXELS.shape
            assert ("frame_count_corrected=10" in volume.notes) == (outcome == "corrected")


def test_a_volume_whose_header_counts_no_frames_is_not_one_b_scan(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    del ds.NumberOfFrames
    with pytest.raises(VolumeRejected, match="unsupported_pixels: 10 frames: a volume"):
        read_bscan(save(ds, tmp_path / "none.dcm"))


@pytest.mark.filterwarnings("ignore:Invalid value for VR DS")
@pytest.mark.parametrize("slope", ["NaN", "inf", "1e308"])
def test_a_rescaling_of_one_frame_that_is_no_finite_number_is_refused(slope: str, tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    for group, number in zip(ds.PerFrameFunctionalGroupsSequence, ["1", slope, *"12121212"], strict=True):
        item = Dataset()
        item.RescaleIntercept, item.RescaleSlope = "0", number
        group.PixelValueTransformationSequence = [item]
    assert reason_of(save(ds, tmp_path / "scan.dcm")) == "broken_header"


def test_native_files_cut_or_miscounted(tmp_path: Path) -> None:
    whole = save(make_dataset(PIXELS), tmp_path / "whole.dcm").read_bytes()
    cut = tmp_path / "cut.dcm"
    cut.write_bytes(whole[: len(whole) - 30_000])
    assert reason_of(cut) == "truncated"
    ds = make_dataset(PIXELS)
    ds.NumberOfFrames = 20
    assert reason_of(save(ds, tmp_path / "many.dcm")) == "frames_missing"
    del ds.NumberOfFrames
    assert "frame_count_corrected=10" in read_volume(save(ds, tmp_path / "none.dcm")).notes


def test_encapsulated_files_cut_at_any_byte(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    use_syntax(ds, PIXELS, JPEG2000Lossless)
    whole = save(ds, tmp_path / "whole.dcm").read_bytes()
    for share in (0.4, 0.7, 0.95):
        cut = tmp_path / f"{share}.dcm"
        cut.write_bytes(whole[: int(share * len(whole))])
        assert reason_of(cut) in {"truncated", "frames_missing", "frames_broken"}


def test_files_that_are_no_oct(tmp_path: Path) -> None:
    (tmp_path / "empty.dcm").write_bytes(b"")
    (tmp_path / "page.dcm").write_text("<!DOCTYPE html><html>403</html>" * 20)
    (tmp_path / "noise.dcm").write_bytes(bytes(128) + b"DICM" + bytes(range(256)) * 4)
    assert reason_of(tmp_path / "empty.dcm") == "empty_file"
    assert reason_of(tmp_path / "page.dcm") == "not_dicom"
    assert reason_of(tmp_path / "noise.dcm") in {"broken_header", "not_structural_oct"}
    ds = make_dataset(PIXELS)
    ds.SOPClassUID = "1.2.840.10008.5.1.4.99999.1"
    path = save(ds, tmp_path / "other.dcm")
    assert reason_of(path) == "not_structural_oct"
    path.write_bytes(path.read_bytes().replace(b"5.1.4.99999.1", b"5.1.4.xxxxx.1"))  # a placeholder met in real sets
    assert reason_of(path) == "not_structural_oct"
    ds = make_dataset(PIXELS)
    del ds.PixelData
    assert reason_of(save(ds, tmp_path / "headless.dcm")) == "no_pixel_data"
    assert reason_of(save(make_dataset(PIXELS[:2]), tmp_path / "two.dcm")) == "too_few_frames"
    with pytest.raises(UsageError, match="no file at"):
        read_volume(tmp_path / "absent.dcm")


def test_every_file_of_a_single_frame_series_is_reported(tmp_path: Path) -> None:
    for index in range(
        5
    ):  # as enhanced multi-frame files of one frame each, the first at the first location of its stack
        ds = make_dataset(PIXELS[index : index + 1])
        ds.SeriesInstanceUID, ds.InstanceNumber = "1.2.3", index + 1
        content = ds.PerFrameFunctionalGroupsSequence[0].FrameContentSequence[0]
        content.InStackPositionNumber = 1 if index < 2 else index + 1
        save(ds, tmp_path / "series" / f"IM{index}")
    (tmp_path / "series" / "IM5").write_bytes(b"")
    reasons = [reason_of(tmp_path / "series" / f"IM{index}") for index in range(6)]
    assert reasons == ["single_frame_series"] * 5 + ["empty_file"]
    line = make_dataset(PIXELS[:1])
    line.SeriesInstanceUID = "1.2.4"
    for name in ("line.dcm", "other.dcm"):  # a volume of the same series next to it makes no series of single frames
        save(line, tmp_path / "lines" / name)
        line = make_dataset(PIXELS)
        line.SeriesInstanceUID = "1.2.4"
    assert reason_of(tmp_path / "lines" / "line.dcm") == "too_few_frames"


def test_wrong_transfer_syntax_and_absurd_size(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    use_syntax(ds, PIXELS, JPEG2000Lossless)
    ds.file_meta.TransferSyntaxUID = JPEGLSLossless
    assert reason_of(save(ds, tmp_path / "lie.dcm")) == "wrong_transfer_syntax"
    ds = make_dataset(PIXELS)
    ds.Rows, ds.Columns, ds.NumberOfFrames = 65535, 65535, 65535
    assert reason_of(save(ds, tmp_path / "huge.dcm")) in {"truncated", "size_implausible"}


def test_describe_says_both_kinds(tmp_path: Path) -> None:
    good = describe_file(save(make_dataset(PIXELS), tmp_path / "good.dcm"))
    assert (good["kind"], good["shape"], good["pattern"], good["reasons"]) == ("volume", [10, 96, 80], "raster", [])
    (tmp_path / "bad.dcm").write_bytes(b"")
    bad = describe_file(tmp_path / "bad.dcm")
    assert bad["kind"] == "rejected"
    assert bad["reasons"][0]["reason"] == "empty_file"
    assert bad.keys() == good.keys()


@pytest.mark.slow
@pytest.mark.data
def test_real_eyes(real_scans: Path) -> None:
    spectralis = read_volume(real_scans / "spectralis_macula_145x496x512_j2k.dcm")
    assert spectralis.shape == (145, 496, 512)
    assert spectralis.spacing_mm == pytest.approx((0.0298, 0.003872, 0.011182), rel=1e-3)
    assert spectralis.provenance == {"slice": "positions", "depth": "shared", "column": "shared"}
    assert spectralis.uncertain == ()
    duke = read_volume(real_scans / "duke_dme_eye01_11x496x768.dcm")
    assert duke.spacing_mm[1:] == pytest.approx((0.003872, 0.0117))
    assert duke.uncertain == ("slice",)  # eleven lines of sixty-one, laid side by side with the pitch of all


def test_details_name_the_function_in_the_code_and_no_header_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octjepa.read import dicom

    def failing(*_: object, **__: object) -> None:
        raise ValueError("cannot read 'Doe^Jane' 19500101")

    path = save(make_dataset(PIXELS), tmp_path / "scan.dcm")
    monkeypatch.setattr(dicom, "read_frame_geometry", failing)
    assert reason_of(path) == "reader_failed"
    with pytest.raises(VolumeRejected, match=r"ValueError raised in test_reader\.failing"):
        read_volume(path)
    monkeypatch.setattr("pydicom.filereader.read_dataset", failing)
    assert reason_of(path) == "broken_header"


HUGE = (
    {"Rows": 65535, "Columns": 65535, "NumberOfFrames": 60000},
    {"Rows": 65535, "Columns": 65535},
    {"NumberOfFrames": 2_000_000_000},
    {"Rows": 60000, "NumberOfFrames": 60000},
)


@pytest.mark.parametrize("claim", HUGE)
@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, JPEG2000Lossless])
def test_a_claim_of_terabytes_is_refused_before_anything_is_allocated(
    syntax: UID, claim: dict[str, int], tmp_path: Path
) -> None:
    ds = make_dataset(PIXELS)
    use_syntax(ds, PIXELS, syntax)
    for name, value in claim.items():
        setattr(ds, name, value)
    path = save(ds, tmp_path / "huge.dcm")
    reason_of(path)  # imports are paid here
    tracemalloc.start()
    start = time.process_time()
    reason = reason_of(path)
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reason in {"size_implausible", "header_contradicts_pixels"}
    assert seconds < 2
    assert peak < 20 << 20


def test_code_streams_that_claim_more_than_the_header_are_not_decoded(tmp_path: Path) -> None:
    """A frame of 65,535 x 65,535 in a file of a few kilobytes."""
    frames = encode(PIXELS, JPEG2000Lossless)
    start = frames[3].index(b"\xff\x51") + 6
    frames[3] = frames[3][:start] + b"\x00\x00\xff\xff" * 2 + frames[3][start + 8 :]
    ds = make_dataset(PIXELS)
    ds.file_meta.TransferSyntaxUID = JPEG2000Lossless
    put_frames(ds, frames)
    path = save(ds, tmp_path / "scan.dcm")
    tracemalloc.start()
    assert "gap_frames=1" in read_volume(path).notes
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 << 20


def test_a_jpeg_ls_frame_without_its_end_is_not_given_to_the_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CharLS looks for the missing end for seconds a frame."""
    from octjepa.read import encapsulated

    option = []
    decode = encapsulated.FrameDecoder.__call__

    def counting(self: object, piece: bytes, stream: object) -> np.ndarray:
        option.append(piece)
        return decode(self, piece, stream)  # type: ignore[arg-type]

    monkeypatch.setattr(encapsulated.FrameDecoder, "__call__", counting)
    frames = encode(PIXELS, JPEGLSLossless)
    frames[4] = frames[4].rstrip(b"\0")[:-2] + b"\0\0"
    ds = make_dataset(PIXELS)
    ds.file_meta.TransferSyntaxUID = JPEGLSLossless
    put_frames(ds, frames)
    assert "gap_frames=1" in read_volume(save(ds, tmp_path / "a.dcm")).notes
    assert len(option) == len(PIXELS) - 1
