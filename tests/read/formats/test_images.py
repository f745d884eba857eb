"""Folders of B-scan images and multi-page TIFFs: order, side pictures, depth, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from eye_files import phantom, write_images, write_sidecar, write_tiff
from octjepa.errors import VolumeRejected
from octjepa.read.formats import is_scan_folder, recognise
from octjepa.read.formats.images import read_image
from octjepa.read.formats.sequence import sequences
from octjepa.read.reader import read_volume

PIXELS, SPACING = phantom()
COUNT = len(PIXELS)


def names_in(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir() if child.is_file())


def refused(path: Path) -> VolumeRejected:
    with pytest.raises(VolumeRejected) as caught:
        read_volume(path, spacing_mm=SPACING)
    assert "Doe" not in str(caught.value)
    return caught.value


def read(path: Path) -> np.ndarray:
    return read_volume(path, spacing_mm=SPACING).pixels


def test_frames_are_counted_as_people_count(tmp_path: Path) -> None:
    assert COUNT > 10  # so that 10 comes before 2 where names are sorted as text
    for name in ("{}.png", "Doe_OD_{:03}.bmp", "2019-03-04 frame {} of 24.tif", "B{}.TIFF"):
        folder = write_images(tmp_path / str(len(name)), PIXELS, name)
        assert is_scan_folder(folder, names_in(folder)), name
        assert recognise(folder) == "images"
        assert np.array_equal(read(folder), PIXELS), name
    from_zero = write_images(tmp_path / "zero", PIXELS, first=0)
    assert np.array_equal(read(from_zero), PIXELS)


def test_names_to_sequences() -> None:
    assert [name for _, name in sequences([f"b{n}.png" for n in (10, 2, 1, 3)])[0]] == [
        "b1.png",
        "b2.png",
        "b3.png",
        "b10.png",
    ]
    times = [f"P1_1015{n:02}_{n}.png" for n in range(1, 9)]
    assert len(sequences(times)[0]) == 8
    two_eyes = [f"P1_{eye}_{n}.png" for eye in ("OD", "OS") for n in range(1, 7)]
    assert [len(scan) for scan in sequences(two_eyes)] == [6, 6]
    many_people = [f"CNV-{person}-{n}.jpeg" for person in (1016042, 1017237) for n in range(1, 6)]
    assert [len(scan) for scan in sequences(many_people)] == [5, 5]
    assert (
        sequences(["a.png", "b.png", "c.png", "d.png", "notes1.txt", "notes2.txt", ".b1.png", "x1.png", "x2.png"]) == []
    )


def test_depth_and_colour(tmp_path: Path) -> None:
    deep = write_images(tmp_path / "deep", PIXELS.astype(np.uint16) * 257)
    assert "scaled_from_16_bit" in read_volume(deep, spacing_mm=SPACING).notes
    assert np.array_equal(read(deep), PIXELS)
    single = write_images(tmp_path / "rgb", np.repeat(PIXELS[..., None], 3, axis=-1))
    assert "rgb_to_grey" in read_volume(single, spacing_mm=SPACING).notes
    assert np.array_equal(read(single), PIXELS)
    lossy = write_images(tmp_path / "jpeg", PIXELS, "{}.jpg")
    assert np.abs(read(lossy).astype(int) - PIXELS).mean() < 8
    colour = np.stack([PIXELS, PIXELS // 2, np.roll(PIXELS, 60, axis=1)], axis=-1)
    assert refused(write_images(tmp_path / "colour", colour)).reason == "not_structural_oct"
    assert refused(write_images(tmp_path / "mask", (PIXELS // 64) * 64)).reason == "not_structural_oct"


def test_pictures_beside_the_scan_are_counted(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "scan", PIXELS)
    Image.new("RGB", (300, 300)).save(folder / "fundus.jpg")
    for number in range(1, COUNT + 1):
        Image.new("L", (20, 20)).save(folder / f"thumb_{number}.png")
    Image.new("L", (200, 200)).save(folder / "scan_0.png")  # the fundus image, counted like a B-scan
    volume = read_volume(folder, spacing_mm=SPACING)
    assert np.array_equal(volume.pixels, PIXELS)
    assert f"images_beside={COUNT + 2}" in volume.notes


def test_gaps_mixed_sizes_and_damage_are_reported_by_number(tmp_path: Path) -> None:
    gaps = write_images(tmp_path / "gaps", PIXELS, "Doe_{}.png")
    for number in (5, 6):
        (gaps / f"Doe_{number}.png").unlink()
    assert (refused(gaps).reason, "2 numbers between them absent: 5, 6" in refused(gaps).detail) == (
        "frames_missing",
        True,
    )
    mixed = write_images(tmp_path / "mixed", PIXELS, "Doe_{}.png")
    Image.new("L", (40, 30)).save(mixed / "Doe_7.png")
    assert (refused(mixed).reason, "number 7" in refused(mixed).detail) == ("unsupported_pixels", True)
    twice = write_images(tmp_path / "twice", PIXELS, "Doe_{}.png")
    (twice / "Doe_03.png").write_bytes((twice / "Doe_3.png").read_bytes())
    assert (refused(twice).reason, "two images bear the number 3" in refused(twice).detail) == ("frames_missing", True)
    for name, content in (("cut", None), ("empty", b"")):
        broken = write_images(tmp_path / name, PIXELS, "Doe_{}.png")
        whole = (broken / "Doe_4.png").read_bytes()
        (broken / "Doe_4.png").write_bytes(whole[: len(whole) // 2] if content is None else content)
        assert (refused(broken).reason, "number 4" in refused(broken).detail) == ("frames_broken", True)
    depth = write_images(tmp_path / "depth", PIXELS)
    Image.fromarray(PIXELS[2].astype(np.uint16)).save(depth / "scan_3.png")
    assert (refused(depth).reason, "number 3" in refused(depth).detail) == ("unsupported_pixels", True)


def test_folders_that_are_no_single_scan(tmp_path: Path) -> None:
    both = write_images(tmp_path / "both", PIXELS, "OD_{}.png")
    write_images(both, PIXELS, "OS_{}.png")
    assert is_scan_folder(both, names_in(both))
    assert "2 sequences of images in one folder" in refused(both).detail
    with_dicom = write_images(tmp_path / "dicom", PIXELS[:5])
    (with_dicom / "IM0001").write_bytes(bytes(128) + b"DICM")
    assert not is_scan_folder(with_dicom, names_in(with_dicom))
    few = write_images(tmp_path / "few", PIXELS[:3])
    assert not is_scan_folder(few, names_in(few))
    assert recognise(few) is None
    scans = tmp_path / "scans"
    scans.mkdir()
    for number in range(1, 6):
        write_tiff(scans / f"eye{number}.tif", PIXELS)
    assert not is_scan_folder(scans, names_in(scans))
    assert recognise(scans / "eye1.tif") == "tiff"
    masked = write_images(tmp_path / "masked", PIXELS)
    np.save(masked / "mask.npy", PIXELS > 90)
    write_sidecar(masked / "geometry.json", spacing_mm=SPACING)
    assert is_scan_folder(masked, names_in(masked))
    assert read_volume(masked).spacing_mm == SPACING


def test_an_en_face_stack_is_not_taken_for_b_scans(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "en_face", np.ascontiguousarray(PIXELS.transpose(1, 0, 2)))
    assert refused(folder).reason == "axes_ambiguous"


def test_where_spacing_is_written_beside_images(tmp_path: Path) -> None:
    for index, name in enumerate(("spacing.json", "geometry.json", "{}.json", "../{}.json")):
        folder = write_images(tmp_path / f"scan{index}", PIXELS)
        write_sidecar(folder / name.format(folder.name), spacing_mm=SPACING)
        assert read_volume(folder).spacing_mm == SPACING, name


def test_tiff_pages(tmp_path: Path) -> None:
    for number, values in enumerate((PIXELS, PIXELS.astype(np.uint16) * 257, PIXELS.astype(np.float32))):
        path = write_tiff(tmp_path / f"scan{number}.tif", values)
        assert recognise(path) == "tiff"
        assert np.array_equal(read(path), PIXELS)
    single = write_tiff(tmp_path / "single.tif", PIXELS[:1])
    assert recognise(single) is None
    assert refused(single).reason == "unknown_format"
    assert refused(write_tiff(tmp_path / "two.tif", PIXELS[:2])).reason == "too_few_frames"
    whole = (tmp_path / "scan0.tif").read_bytes()
    for share in (0.3, 0.7, 0.99):
        cut = tmp_path / "cut.tif"
        cut.write_bytes(whole[: int(share * len(whole))])
        assert recognise(cut) == "tiff"
        assert refused(cut).reason in {"truncated", "frames_broken", "unsupported_pixels", "too_few_frames"}


def test_eye_and_person_come_from_names_and_folders(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "cirrus" / "P7" / "OS", PIXELS)
    volume = read_volume(folder, spacing_mm=SPACING)
    assert (volume.laterality, volume.laterality_source) == ("OS", "path")


def test_hexadecimal_numbers_count_the_frames(tmp_path: Path) -> None:
    """2F0F8 to 2F10F: sorted as decimal numbers, 10 of 24 were read."""
    for prefix in ("", "oct_", "Doe_B"):
        folder = tmp_path / f"hex{prefix}"
        folder.mkdir()
        for number, frame in enumerate(PIXELS, 0x2F0F8):
            Image.fromarray(frame).save(folder / f"{prefix}{number:X}.png")
        assert is_scan_folder(folder, names_in(folder))
        assert np.array_equal(read(folder), PIXELS), prefix
    (folder / "Doe_B2F100.png").rename(folder / "Doe_B3F100.png")
    error = refused(folder)
    assert (error.reason, "hexadecimal" in error.detail) == ("frames_missing", True)
    assert sequences([f"a{n}.png" for n in range(1, 10)] + [f"b{n}.png" for n in range(1, 10)])[0][0] == (1, "a1.png")


def test_imagej_stacks_have_one_page_and_more_images(tmp_path: Path) -> None:
    import tifffile

    for name, values in (("8", PIXELS), ("16", PIXELS.astype(np.uint16) * 257), ("32", PIXELS / np.float32(255))):
        path = tmp_path / f"stack{name}.tif"
        tifffile.imwrite(path, values, imagej=True, byteorder="<" if name == "8" else ">")
        content = path.read_bytes()
        with tifffile.TiffFile(path) as tiff:
            first_end = tiff.pages[0].offset + 2 + 12 * len(tiff.pages[0].tags)
        one_page = bytearray(content)
        one_page[first_end : first_end + 4] = bytes(4)
        path.write_bytes(one_page)
        with tifffile.TiffFile(path) as tiff:
            assert len(tiff.pages) == 1
        assert recognise(path) == "tiff"
        assert np.abs(read(path).astype(int) - PIXELS).max() <= 1, name
        path.write_bytes(one_page[: len(one_page) // 2])
        assert refused(path).reason == "truncated"
        path.write_bytes(bytes(one_page).replace(f"={COUNT}\n".encode(), b"=99\n"))
        assert refused(path).reason == "truncated"


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "zlib"},
        {"compression": "zlib", "predictor": True},
        {"rowsperstrip": 7},
        {"compression": "lzw"},
        {"tile": (64, 64)},
        {"photometric": "miniswhite"},
        {"bigtiff": True},
    ],
)
def test_tiff_of_every_layout_is_the_same_scan(tmp_path: Path, order: str, options: dict[str, object]) -> None:
    import tifffile

    for dtype in (np.uint8, np.uint16):
        path = tmp_path / "scan.tif"
        inverted = options.get("photometric") == "miniswhite"
        if inverted and dtype == np.uint16:
            continue  # the next test
        values = 255 - PIXELS if inverted else PIXELS
        with tifffile.TiffWriter(path, byteorder=order, bigtiff=bool(options.get("bigtiff"))) as writer:
            more = {key: value for key, value in options.items() if key != "bigtiff"}
            for frame in values.astype(dtype):
                writer.write(frame, contiguous=False, metadata=None, **more)
        assert np.array_equal(read(path), PIXELS), (dtype, options)


def test_deep_tiffs_that_store_white_as_zero_are_turned_or_refused(tmp_path: Path) -> None:
    import tifffile

    deep = 65535 - PIXELS.astype(np.uint16) * 257
    tifffile.imwrite(tmp_path / "pages.tif", deep, photometric="miniswhite")
    assert np.array_equal(read(tmp_path / "pages.tif"), PIXELS)
    (tmp_path / "scan").mkdir()
    for number, frame in enumerate(deep, 1):
        tifffile.imwrite(tmp_path / "scan" / f"{number}.tif", frame, photometric="miniswhite")
    assert np.array_equal(read(tmp_path / "scan"), PIXELS)
    assert np.array_equal(read_image(tmp_path / "scan" / "3.tif")[0], PIXELS[2])
    tifffile.imwrite(tmp_path / "float.tif", deep.astype(np.float32), photometric="miniswhite")
    assert refused(tmp_path / "float.tif").reason == "unsupported_pixels"
    tifffile.imwrite(tmp_path / "big.tif", deep, photometric="miniswhite", byteorder=">")
    assert refused(tmp_path / "big.tif").reason == "unsupported_pixels"


def test_pictures_are_turned_as_their_exif_orientation_says(tmp_path: Path) -> None:
    steps = {3: 2, 6: 1, 8: 3}  # quarter turns against the clock that undo the orientation
    for orientation, turns in steps.items():
        folder = tmp_path / str(orientation)
        folder.mkdir()
        exif = Image.Exif()
        exif[0x0112] = orientation
        for number, frame in enumerate(PIXELS, 1):
            image = Image.fromarray(np.ascontiguousarray(np.rot90(frame, turns)))
            image.save(folder / f"b{number}.jpg", quality=100, exif=exif)
        volume = read_volume(folder, spacing_mm=SPACING)
        assert np.abs(volume.pixels.astype(int) - PIXELS).mean() < 3, orientation
        assert "exif_orientation_applied" in volume.notes


def test_stacks_of_class_masks_are_not_scans(tmp_path: Path) -> None:
    """Masks that were resized or drawn in colours hold more than sixteen values at their edges."""
    classes = np.zeros(PIXELS.shape, np.uint8)
    slices, columns = np.ogrid[: PIXELS.shape[0], : PIXELS.shape[2]]
    for index, edge in enumerate((20, 60, 90, 120, 150)):
        wave = edge + 8 * np.sin((columns + 3 * slices) / 20)
        classes[np.arange(PIXELS.shape[1])[None, :, None] > wave[:, None]] = 40 * (index + 1)
    blurred = [np.asarray(Image.fromarray(mask).resize((300, 300)), np.uint8) for mask in classes]
    error = refused(write_images(tmp_path / "blurred", np.stack(blurred)))
    assert (error.reason, "segmentation" in error.detail) == ("not_structural_oct", True)
    palette = tmp_path / "palette"
    palette.mkdir()
    for number, mask in enumerate(classes // 40, 1):
        image = Image.fromarray(mask, "P")
        image.putpalette([0, 0, 0, 60, 60, 60, 90, 90, 90, 120, 120, 130, 200, 200, 200, 255, 255, 255])
        image.save(palette / f"m{number}.png")
    assert refused(palette).reason == "not_structural_oct"
    assert np.array_equal(read(write_images(tmp_path / "dark", PIXELS // 8)), PIXELS // 8)  # dark, but with speckle


def test_pictures_of_many_sizes_are_named_as_such(tmp_path: Path) -> None:
    folder = tmp_path / "plots"
    folder.mkdir()
    for number in range(30):
        Image.fromarray(np.zeros((100 + 7 * number, 200 + 3 * number), np.uint8)).save(folder / f"plot{7 * number}.png")
    error = refused(folder)
    assert (error.reason, "30 images of 30 different sizes" in error.detail) == ("unsupported_pixels", True)


def test_a_thorlabs_archive_is_named(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "scan.oct", "w") as archive:
        archive.writestr("Header.xml", "<Ocity/>")
    error = refused(tmp_path / "scan.oct")
    assert (error.reason, "Thorlabs" in error.detail) == ("unknown_format", True)
