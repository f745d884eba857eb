"""Spacing, order, pattern: from the best source there is, and never a default."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import Dataset
from pydicom.uid import UID, ExplicitVRLittleEndian, JPEG2000Lossless

from oct_dicom import make_dataset, retina, save, use_syntax
from octjepa.errors import VolumeRejected
from octjepa.read.manifest import ManifestRow
from octjepa.read.one_frame import read_one_frame
from octjepa.read.orientation import has_slice_direction
from octjepa.read.protocols import protocol_spacing
from octjepa.read.raw_scan import FrameGeometry, RawScan
from octjepa.read.reader import assemble, read_volume
from octjepa.volume import OCTVolume

PIXELS = retina()


def read(ds: Dataset, tmp_path: Path) -> OCTVolume:
    return read_volume(save(ds, tmp_path / "scan.dcm"))


def measures(ds: Dataset) -> Dataset:
    return ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]


def without_positions(ds: Dataset) -> Dataset:
    for group in ds.PerFrameFunctionalGroupsSequence:
        if "PlanePositionSequence" in group:
            group.PlanePositionSequence[0].ImagePositionPatient = []
    return ds


def as_cirrus(frames: int) -> Dataset:
    ds = make_dataset(retina(frames=frames), pitch_mm=0.0117)
    ds.Manufacturer, ds.ManufacturerModelName = "Carl Zeiss Meditec", "CIRRUS HD-OCT 5000"
    ds.ProtocolName = "cirrus mac oct"
    ds.Columns, ds.Rows = 80, 96
    measures(ds).PixelSpacing = [0.00195, 0.075]  # out of limits on purpose where it is used
    return ds


def test_positions_come_before_thickness(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS, 0.05)
    measures(ds).SliceThickness = 0.3
    volume = read(ds, tmp_path)
    assert volume.spacing_mm[0] == pytest.approx(0.05)
    assert volume.provenance["slice"] == "positions"


def test_thickness_alone_is_uncertain(tmp_path: Path) -> None:
    volume = read(without_positions(make_dataset(PIXELS, 0.08)), tmp_path)
    assert volume.spacing_mm[0] == pytest.approx(0.08)
    assert volume.provenance["slice"] == "shared"
    assert volume.uncertain == ("slice",)
    assert "positions_missing" in volume.notes


def test_a_spacing_between_slices_of_zero_does_not_hide_the_thickness(tmp_path: Path) -> None:
    ds = without_positions(make_dataset(PIXELS, 0.08))
    measures(ds).SpacingBetweenSlices = 0
    volume = read(ds, tmp_path)
    assert volume.spacing_mm[0] == pytest.approx(0.08)
    assert volume.provenance["slice"] == "shared"


def test_cirrus_thickness_that_repeats_the_column_spacing_is_not_believed(tmp_path: Path) -> None:
    ds = without_positions(as_cirrus(frames=32))
    measures(ds).PixelSpacing = [0.00195, 0.0117]
    measures(ds).SliceThickness = 0.0117
    volume = read(ds, tmp_path)
    assert volume.spacing_mm[0] == pytest.approx(6 / 32)
    assert volume.provenance["slice"] == "protocol"
    assert "slice_thickness_is_column_spacing" in volume.notes


def test_spacing_is_never_a_default(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    ds.ProtocolName, ds.ManufacturerModelName, ds.Manufacturer = "", "Unknown", "Nobody"
    with pytest.raises(VolumeRejected, match="spacing_unknown: no plausible spacing of depth, column:"):
        read(ds, tmp_path)
    for absurd in ([1.0, 1.0], [0, 0], [0.0026, 11.7]):
        ds = make_dataset(PIXELS)
        measures(ds).PixelSpacing = absurd
        ds.ProtocolName = ""
        with pytest.raises(VolumeRejected, match="spacing_unknown"):
            read(ds, tmp_path)
    ds = without_positions(make_dataset(PIXELS))
    measures(ds).SliceThickness = 1.0
    ds.ProtocolName = ""
    with pytest.raises(VolumeRejected, match="spacing_unknown: slice pitch"):
        read(ds, tmp_path)


def test_swapped_spacing_is_put_right_and_marked(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    measures(ds).PixelSpacing = [0.0117, 0.0026]
    ds.ProtocolName = ""
    volume = read(ds, tmp_path)
    assert volume.spacing_mm[1:] == (0.0026, 0.0117)
    assert set(volume.uncertain) == {"depth", "column"}


def test_frames_are_ordered_by_position_and_uneven_gaps_retained(tmp_path: Path) -> None:
    positions = np.array([0, 0.05, 0.1, 0.15, 0.2, 0.4, 0.45, 0.5, 0.55, 0.6])
    shuffle = np.random.default_rng(0).permutation(10)
    ds = make_dataset(PIXELS[shuffle])
    for group, location in zip(ds.PerFrameFunctionalGroupsSequence, positions[shuffle], strict=True):
        group.PlanePositionSequence[0].ImagePositionPatient = [0.0, float(location), 0.0]
    volume = read(ds, tmp_path)
    assert np.array_equal(volume.pixels, PIXELS)
    assert volume.slice_positions_mm == pytest.approx(positions)
    assert {"frames_unordered", "pitch_uneven"} <= set(volume.notes)


@pytest.mark.parametrize(
    "positions_mm",
    [
        [0.0, 0.6, 1.2, 1.8, 2.4],  # a raster of five lines
        [0.0, 1.5, 3.0, 4.5, 6.0],
        [0.0, 0.03, 0.06, 1.56, 1.59, 2.79],  # lines that a study follows
        [0.0, 1.2, 1.23, 2.6, 4.1],
    ],
)
@pytest.mark.parametrize("thickness", [None, 0.12])
def test_wide_and_uneven_gaps_between_positions_stay(
    positions_mm: list[float], thickness: float | None, tmp_path: Path
) -> None:
    ds = make_dataset(retina(len(positions_mm)))
    del measures(ds).SliceThickness
    if thickness:
        measures(ds).SliceThickness = thickness
    for group, mm in zip(ds.PerFrameFunctionalGroupsSequence, positions_mm, strict=True):
        group.PlanePositionSequence[0].ImagePositionPatient = [0.0, mm, 0.0]
    volume = read(ds, tmp_path)
    assert volume.slice_positions_mm is not None
    np.testing.assert_allclose(volume.slice_positions_mm, positions_mm, atol=1e-6)
    assert volume.provenance["slice"] == "positions"
    assert volume.spacing_mm[0] == pytest.approx(float(np.median(np.diff(positions_mm))))


def test_positions_that_are_there_are_not_called_missing(tmp_path: Path) -> None:
    ds = make_dataset(retina(6))
    del measures(ds).SliceThickness
    ds.ProtocolName = ""
    for index, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
        group.PlanePositionSequence[0].ImagePositionPatient = [0.0, 2.3 * index, 0.0]
    with pytest.raises(VolumeRejected, match=r"spacing_unknown: slice pitch: .*positions: 2.3 to 2.3 mm apart"):
        read(ds, tmp_path)
    for index, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
        group.PlanePositionSequence[0].ImagePositionPatient = [0.0, 1.0, 0.0] if index else []
    with pytest.raises(VolumeRejected, match=r"positions: missing for 1 of 6 frames"):
        read(ds, tmp_path)


def test_reversed_frames_and_in_stack_numbers(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS[::-1])
    for index, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
        group.PlanePositionSequence[0].ImagePositionPatient = [0.0, 0.05 * (9 - index), 0.0]
    volume = read(ds, tmp_path)
    assert np.array_equal(volume.pixels, PIXELS)
    assert "frames_reversed" in volume.notes

    ds = without_positions(make_dataset(PIXELS[[0, 2, 1, *range(3, 10)]]))
    for group, number in zip(ds.PerFrameFunctionalGroupsSequence, [1, 3, 2, *range(4, 11)], strict=True):
        group.FrameContentSequence[0].InStackPositionNumber = number
    assert np.array_equal(read(ds, tmp_path).pixels, PIXELS)


def test_implausible_positions_in_reverse_leave_no_note_of_an_order_that_is_not_used(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    for index, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
        group.PlanePositionSequence[0].ImagePositionPatient = [0.0, -0.0005 * index, 0.0]
    volume = read(ds, tmp_path)
    assert np.array_equal(volume.pixels, PIXELS)
    assert "slice_positions_implausible" in volume.notes
    assert "frames_reversed" not in volume.notes
    frame = read_one_frame(tmp_path / "scan.dcm", 2, volume.shape, volume.notes)
    assert frame is not None
    assert np.array_equal(frame, PIXELS[2])


def test_positions_that_contradict_the_pictures_are_not_followed(tmp_path: Path) -> None:
    moving = np.stack([np.roll(PIXELS[0], 7 * z, axis=1) for z in range(10)])
    moving[:, :, :4] = 0
    ds = make_dataset(moving)
    for group, location in zip(ds.PerFrameFunctionalGroupsSequence, [0, 5, 1, 6, 2, 7, 3, 8, 4, 9], strict=True):
        group.PlanePositionSequence[0].ImagePositionPatient = [0.0, 0.05 * location, 0.0]
    volume = read(ds, tmp_path)
    assert np.array_equal(volume.pixels, moving)
    assert "order_by_correlation" in volume.notes
    assert "slice" in volume.uncertain


def _located(ds: Dataset, points: list[list[float]]) -> Dataset:
    for group, line in zip(ds.PerFrameFunctionalGroupsSequence, points, strict=True):
        location = Dataset()
        location.ReferenceCoordinates = line
        location.OphthalmicImageOrientation = "LINEAR" if len(line) == 4 else "NONLINEAR"
        group.OphthalmicFrameLocationSequence = [location]
    return ds


def test_parallel_lines_on_the_fundus_image_give_the_pitch(tmp_path: Path) -> None:
    # 80 columns of 0.0117 mm over 400 px: 2.34 um a px; lines 30 px apart.
    ds = _located(
        without_positions(make_dataset(PIXELS)), [[100.0 + 30 * z, 50, 100.0 + 30 * z, 450] for z in range(10)]
    )
    volume = read(ds, tmp_path)
    assert volume.provenance["slice"] == "frame_location"
    assert volume.spacing_mm[0] == pytest.approx(30 * 80 * 0.0117 / 400)


def test_radial_scans_are_recognised_and_their_circles_dropped(tmp_path: Path) -> None:
    lines = []
    for z in range(8):
        angle = np.pi * z / 8
        lines.append(
            [300 - 200 * np.sin(angle), 300 - 200 * np.cos(angle), 300 + 200 * np.sin(angle), 300 + 200 * np.cos(angle)]
        )
    circle = [float(v) for t in np.linspace(0, 6, 12) for v in (300 + 90 * np.sin(t), 300 + 90 * np.cos(t))]
    ds = _located(without_positions(make_dataset(PIXELS)), [*lines, circle, circle])
    del measures(ds).SliceThickness
    ds.Manufacturer, ds.ManufacturerModelName = "Heidelberg Engineering", "Spectralis"
    volume = read(ds, tmp_path)
    assert volume.pattern == "radial"
    assert volume.shape[0] == 8
    assert "circle_frames_dropped=2" in volume.notes
    assert "slice" in volume.uncertain


def test_lines_of_zeros_are_not_stated(tmp_path: Path) -> None:
    ds = _located(make_dataset(PIXELS), [[0.0] * 4] * len(PIXELS))
    ds.Manufacturer, ds.ManufacturerModelName = "Acme", "X1"
    volume = read(ds, tmp_path)
    assert (volume.pattern, volume.shape, volume.provenance["slice"]) == ("raster", PIXELS.shape, "positions")


def test_triton_3d_radial_is_a_raster(tmp_path: Path) -> None:
    ds = without_positions(make_dataset(PIXELS))
    ds.ManufacturerModelName, ds.ProtocolName = "Triton", "triton 3d radial oct"
    assert read(ds, tmp_path).pattern == "raster"


@pytest.mark.parametrize(
    ("protocol", "slow_mm", "fast_mm"),
    [
        ("3d macula 512x128", 6 * 128 / 127, 6),
        ("octa macula 4.5x4.5mm", 4.5, 4.5),
        ("macula 6.0 mm x 6.0 mm", 6, 6),
        ("macula 12x9", 9, 12),
        ("macula, 6 x 6", 6, 6),
    ],
)
def test_the_field_in_a_protocol_is_not_a_count(protocol: str, slow_mm: float, fast_mm: float) -> None:
    spacing = protocol_spacing("topcon_maestro2", protocol, (128, 885, 512))
    assert spacing is not None
    assert spacing.slice_mm == pytest.approx(slow_mm / 128)
    assert spacing.column_mm == pytest.approx(fast_mm / 512)


@pytest.mark.parametrize(
    ("protocol", "slow_mm", "fast_mm"),
    [("angiography 3x3 mm", 3, 3), ("macula 12 x 9 mm", 9, 12), ("macular cube 512x128", 6, 6), ("", 6, 6)],
)
def test_a_cirrus_field_is_the_stated_one_else_6_mm(protocol: str, slow_mm: float, fast_mm: float) -> None:
    spacing = protocol_spacing("zeiss_cirrus", protocol, (245, 1024, 350))
    assert spacing is not None
    assert (spacing.slice_mm, spacing.column_mm) == pytest.approx((slow_mm / 245, fast_mm / 350))


def test_laterality_and_device_sources_are_cross_checked(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds.ImageLaterality = "L"
    volume = read(ds, tmp_path)
    assert (volume.laterality, volume.laterality_source) == ("OS", "header")
    assert "laterality_disagrees" in volume.notes
    del ds.ImageLaterality
    volume = read(ds, tmp_path)
    assert (volume.laterality, volume.laterality_source) == ("OD", "frame")
    del ds.SharedFunctionalGroupsSequence[0].FrameAnatomySequence
    named = read_volume(save(ds, tmp_path / "1234_maestro2_3d_macula_oct_oct_l_1.2.3.dcm"))
    assert (named.laterality, named.laterality_source) == ("OS", "name")
    elsewhere = read_volume(save(ds, tmp_path / "topcon_triton" / "1234" / "x.dcm"))
    assert "device_disagrees" in elsewhere.notes


def test_a_name_used_as_an_id_is_not_copied(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds.PatientID = "Doe^Jane"
    volume = read(ds, tmp_path)
    assert volume.person_id.startswith("p-")
    assert "Doe" not in repr(volume)


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, JPEG2000Lossless])
def test_frame_facts_read_raw_are_what_pydicom_makes_of_them(syntax: UID, tmp_path: Path) -> None:
    from pydicom import dcmread

    from octjepa.read.frames import read_frame_geometry

    ds = make_dataset(PIXELS)
    use_syntax(ds, PIXELS, syntax)
    path = save(ds, tmp_path / "scan.dcm")
    raw, converted = dcmread(path), dcmread(path)
    list(converted.iterall())  # pydicom converts an element when it is option for
    one, other = read_frame_geometry(raw, len(PIXELS)), read_frame_geometry(converted, len(PIXELS))
    for name in one.__dataclass_fields__:
        assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True), name
    assert np.isfinite(one.positions_mm).all()


def test_positions_and_fundus_lines_order_frames_alike(tmp_path: Path) -> None:
    """With rows to the right and depth away from the viewer, the plane normal points up on the fundus image."""
    upward = [[500.0 - 30 * z, 50, 500.0 - 30 * z, 450] for z in range(10)]  # rows of the image rise downwards
    by_position = read(_located(make_dataset(PIXELS), upward), tmp_path)
    by_line = read(_located(without_positions(make_dataset(PIXELS)), upward), tmp_path)
    assert (by_position.provenance["slice"], by_line.provenance["slice"]) == ("positions", "frame_location")
    assert np.array_equal(by_position.pixels, by_line.pixels)
    downward = without_positions(make_dataset(PIXELS))
    assert np.array_equal(read(_located(downward, upward[::-1]), tmp_path).pixels, PIXELS[::-1])


def test_a_row_spacing_that_is_not_the_devices_own_is_uncertain(tmp_path: Path) -> None:
    native = retina(frames=5, rows=496)
    for pair, row_mm, note in (([0.0039, 0.012], 0.0039, None), ([0.0078, 0.012], 0.0078, "depth_disagrees")):
        ds = make_dataset(native)
        ds.Manufacturer, ds.ManufacturerModelName, ds.ProtocolName = "Heidelberg Engineering", "Spectralis", ""
        measures(ds).PixelSpacing = pair
        volume = read(ds, tmp_path)
        assert volume.spacing_mm[1] == row_mm
        assert ("depth" in volume.uncertain) == (note is not None)
        assert any(message.startswith(note) for message in volume.notes) if note else True
    # Both within the limits of either axis: only the device tells that they changed places.
    ds = make_dataset(native)
    ds.Manufacturer, ds.ManufacturerModelName, ds.ProtocolName = "Heidelberg Engineering", "Spectralis", ""
    measures(ds).PixelSpacing = [0.006, 0.003872]
    volume = read(ds, tmp_path)
    assert volume.spacing_mm[1:] == (0.003872, 0.006)
    assert "spacing_swapped" in volume.notes


def test_thickness_and_positions_that_disagree_are_reported(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS, 0.05)
    measures(ds).SliceThickness = 0.02
    volume = read(ds, tmp_path)
    assert volume.spacing_mm[0] == pytest.approx(0.05)
    assert "pitch_disagrees_with_thickness" in volume.notes
    assert "slice" in volume.uncertain


def test_a_spacing_option_keeps_the_files_order_and_notes_what_it_contradicts(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    groups = ds.PerFrameFunctionalGroupsSequence
    locations = [group.PlanePositionSequence[0].ImagePositionPatient for group in groups]
    for group, location in zip(groups, locations[::-1], strict=True):
        group.PlanePositionSequence[0].ImagePositionPatient = location
    path = save(ds, tmp_path / "scan.dcm")
    plain = read_volume(path)
    same = read_volume(path, spacing_mm=plain.spacing_mm)
    assert "frames_reversed" in plain.notes
    assert "frames_reversed" in same.notes
    assert np.array_equal(same.pixels, plain.pixels)
    assert set(same.provenance.values()) == {"option"}
    assert not [note for note in same.notes if note.startswith("option_disagrees")]
    assert has_slice_direction(plain)
    assert has_slice_direction(same)  # the spacing is the user's, the order that of the positions
    dz, dy, dx = plain.spacing_mm
    other = read_volume(path, spacing_mm=(dz * 1.5, dy, dx))
    assert "option_disagrees_slice" in other.notes
    assert other.spacing_mm == (dz * 1.5, dy, dx)


def test_a_spacing_option_keeps_the_order_of_positions_in_a_file_without_a_spacing(tmp_path: Path) -> None:
    order = np.random.default_rng(1).permutation(len(PIXELS))
    ds = make_dataset(PIXELS[order])
    ds.ManufacturerModelName = "unlisted"
    del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    for group, number in zip(ds.PerFrameFunctionalGroupsSequence, order, strict=True):
        group.PlanePositionSequence[0].ImagePositionPatient = [0, 0.05 * number + 0.1 * (number > 3), 0]
        del group.FrameContentSequence
    volume = read_volume(save(ds, tmp_path / "scan.dcm"), spacing_mm=(0.05, 0.0026, 0.0117))
    assert np.array_equal(volume.pixels, PIXELS)
    assert {"frames_unordered", "order_from_positions", "pitch_uneven"} <= set(volume.notes)
    assert not [note for note in volume.notes if note.startswith("option_disagrees")]
    assert has_slice_direction(volume)


def test_positions_without_an_orientation_do_not_state_the_direction(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    del ds.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence
    path = save(ds, tmp_path / "scan.dcm")
    for volume in (read_volume(path), read_volume(path, spacing_mm=read_volume(path).spacing_mm)):
        assert "direction_unstated" in volume.notes
        assert not has_slice_direction(volume)
    assert read_volume(path).provenance["slice"] == "positions"


@pytest.mark.parametrize("step", [1, -1])
def test_positions_in_the_plane_of_a_default_orientation_order_the_b_scans(step: int, tmp_path: Path) -> None:
    ds = make_dataset(PIXELS, 0.05)
    ds.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0].ImageOrientationPatient = [1.0, 0, 0, 0, 1.0, 0]
    del measures(ds).SliceThickness
    for number, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
        group.PlanePositionSequence[0].ImagePositionPatient = [0.0, step * 0.05 * number, 0.0]
    volume = read(ds, tmp_path)
    assert volume.spacing_mm[0] == pytest.approx(0.05)
    assert volume.provenance["slice"] == "positions"
    assert "direction_unstated" in volume.notes
    assert "positions_repeated" not in volume.notes
    assert not has_slice_direction(volume)
    assert np.array_equal(volume.pixels, PIXELS)


def test_a_refusal_says_how_positions_repeat(tmp_path: Path) -> None:
    for drift, text in ((0.0, "all the same"), (0.01, "all in the plane of the B-scans")):
        ds = make_dataset(PIXELS, 0.05)
        ds.ManufacturerModelName, ds.ProtocolName = "unlisted", "cube"
        del measures(ds).SliceThickness
        for number, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
            group.PlanePositionSequence[0].ImagePositionPatient = [drift * number, 0.0, 0.0]
        with pytest.raises(VolumeRejected, match=f"slice pitch: none is plausible. Frame positions: {text} "):
            read(ds, tmp_path)


def test_a_spacing_option_with_the_pitch_of_uneven_positions_leaves_them_uneven(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    for number, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
        group.PlanePositionSequence[0].ImagePositionPatient = [0, 0.05 * number + 0.1 * (number > 3), 0]
    path = save(ds, tmp_path / "scan.dcm")
    plain = read_volume(path)
    same = read_volume(path, spacing_mm=plain.spacing_mm)
    assert same.slice_positions_mm == pytest.approx(plain.slice_positions_mm)
    assert "pitch_uneven" in same.notes
    dz, dy, dx = plain.spacing_mm
    other = read_volume(path, spacing_mm=(dz * 2, dy, dx))
    assert other.slice_positions_mm is None
    assert "option_disagrees_slice" in other.notes


@pytest.mark.parametrize(
    ("spacing", "axes"),
    [
        ((0.26, 0.0078, 0.04), ()),
        ((0.002, 0.001, 0.002), ("slice", "depth", "column")),
        ((0.26, 0.0078, 0.003), ("column",)),
        ((0.5, 0.0078, 0.06), ()),
    ],
)
def test_an_extent_that_no_oct_has_is_uncertain(
    spacing: tuple[float, float, float], axes: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "scan.npy"
    np.save(path, retina(24, 184, 160))
    volume = read_volume(path, spacing_mm=spacing)
    assert volume.uncertain == axes
    assert ("extent_implausible" in volume.notes) == bool(axes)


def test_extents_that_are_too_long_and_parts_of_scans() -> None:
    from octjepa.read.geometry import implausible_extents

    assert implausible_extents((128, 1024, 1024), (0.3, 0.01, 0.06)) == ("slice", "depth", "column")
    assert implausible_extents((4, 64, 64), (0.05, 0.0026, 0.0117)) == ()
    assert implausible_extents((200, 200, 200), (0.03, 0.00195, 0.03)) == ()
    assert implausible_extents((512, 992, 512), (0.0234, 0.0026, 0.0234)) == ()


@pytest.mark.parametrize("source", ["shared", "per_frame", "header", "manifest", "sidecar"])
def test_spacings_are_exchanged_with_the_rows_and_columns_that_they_are_of(source: str, tmp_path: Path) -> None:
    """All but that of a JSON file, which names its axes."""
    stored, pixels = (0.006, 0.0039), np.ascontiguousarray(PIXELS.swapaxes(1, 2))
    scan = RawScan("built", pixels, FrameGeometry.unknown(len(pixels)), spacing_mm=(0.05, None, None))
    row = None
    if source == "shared":
        scan = replace(scan, pixel_spacing_mm=stored)
    elif source == "per_frame":
        scan.frame_geometry.spacing_mm[:] = stored
    elif source == "manifest":
        row = ManifestRow("", "", "", "", "", None, stored, None, "", "scan.dcm")
    else:
        scan = replace(scan, spacing_mm=(0.05, *stored), spacing_from=source)
    volume = assemble(scan, tmp_path / "scan.dcm", row)
    assert "axes_transposed" in volume.notes
    assert "manifest_spacing_disagrees" not in volume.notes
    assert volume.provenance["depth"] == source
    assert volume.spacing_mm[1:] == (stored if source == "sidecar" else stored[::-1])
