"""Labels as other programs write them: masks as images, MATLAB, HEYEX, eyepy and arrays, complete and partial."""

from __future__ import annotations

import json
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from octjepa.errors import UsageError
from octjepa.layers import BOUNDARIES
from octjepa.read.formats.images import frame_names, read_images
from octjepa.tasks.labels.label_files import LabelFolder, LabelVolume, ScanNames
from octjepa.tasks.labels.layer_labels import LAYER_CLASSES, boundaries_of_codes
from octjepa.tasks.labels.layer_names import boundary_index, class_set
from octjepa.tasks.labels.mask_images import read_masks

SHAPE = (5, 40, 12)
ROWS = np.array([4, 8, 12, 16, 20, 26, 30, 34], np.float32)


def layers() -> np.ndarray:
    """Eight boundaries `[8, B-scan, column]`; B-scan 3 and column 0 are not graded."""
    rows = np.broadcast_to(ROWS[:, None, None], (8, SHAPE[0], SHAPE[2])).copy()
    rows[:, 3] = rows[:, :, 0] = np.nan
    return rows


def fluid() -> np.ndarray:
    """A mask `[B-scan, depth, column]` of fluid; it also marks an ungraded B-scan."""
    mask = np.zeros(SHAPE, np.uint8)
    mask[1:4, 17:22, 4:8] = 1
    return mask


def codes() -> np.ndarray:
    """A drawing with the classes 0, 1 and 2."""
    drawn = np.zeros(SHAPE, np.uint8)
    drawn[:, 10:14, 2:6], drawn[1:, 20:22] = 1, 2
    return drawn


def read(folder: Path, scan: str = "scan.dcm", bscans: tuple[str, ...] | None = ()) -> LabelVolume:
    labels = LabelFolder(folder)
    file = labels.file_for(ScanNames("", f"some/{scan}", "0"))
    assert file is not None
    assert labels.names(file)
    return labels.read(file, labels.names(file), SHAPE, bscans)


def write_masks(folder: Path, values: np.ndarray, name: str = "{}.png", first: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, mask in enumerate(values, first):
        Image.fromarray(mask).save(folder / name.format(number))


def table(folder: Path, **names: str) -> None:
    (folder / "classes.json").write_text(json.dumps({key.lstrip("_"): name for key, name in names.items()}))


def refused(folder: Path, **options: object) -> str:
    with pytest.raises(UsageError) as error:
        read(folder, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("ending", ["png", "tif", "bmp"])
def test_indexed_masks(tmp_path: Path, ending: str) -> None:
    write_masks(tmp_path / "scan", codes(), f"b_{{}}.{ending}")
    table(tmp_path, _1="fluid", _2="drusen")
    labels = read(tmp_path)
    assert labels.names == ("fluid", "drusen")
    assert np.array_equal(labels.codes, codes())


def test_masks_in_colour_and_with_a_palette(tmp_path: Path) -> None:
    colours = np.array([[0, 0, 0], [255, 0, 0], [0, 0, 255]], np.uint8)
    write_masks(tmp_path / "rgb" / "scan", colours[codes()])
    names = {"#ff0000": "fluid", "#0000FF": "drusen", "#000000": "background"}
    table(tmp_path / "rgb" / "scan", **names)
    (tmp_path / "palette" / "scan").mkdir(parents=True)
    for number, mask in enumerate(codes()):
        image = Image.fromarray(mask, "P")
        image.putpalette(colours.ravel().tolist())
        image.save(tmp_path / "palette" / "scan" / f"{number}.png")
    table(tmp_path / "palette", _1="fluid", _2="drusen")
    for kind in ("rgb", "palette"):
        assert np.array_equal(read(tmp_path / kind).codes, codes()), kind
    table(tmp_path / "rgb" / "scan", **{"#ff0000": "fluid", "#000000": "unlabelled"})
    assert "scan/2.png holds #0000ff, which classes.json does not name" in refused(tmp_path / "rgb")
    table(tmp_path / "rgb" / "scan", **{**names, "#000000": "unlabelled"})
    assert np.array_equal(read(tmp_path / "rgb").codes, np.where(codes() == 0, 255, codes()))


def test_one_folder_for_each_class(tmp_path: Path) -> None:
    for code, name in ((1, "drusen"), (2, "fluid")):
        write_masks(tmp_path / "scan" / name, np.where(codes() == code, 200, 0).astype(np.uint8))
    labels = read(tmp_path)
    assert labels.names == ("drusen", "fluid")
    assert np.array_equal(labels.codes, codes())
    write_masks(tmp_path / "scan" / "haze", np.full(SHAPE, 255, np.uint8))
    assert "marks voxels of B-scan 1 that another class" in refused(tmp_path)


def test_frames_without_a_mask_are_not_background(tmp_path: Path) -> None:
    table(tmp_path, _1="fluid", _2="drusen")
    (tmp_path / "scan").mkdir()
    for number in (2, 5):
        Image.fromarray(codes()[number - 1]).save(tmp_path / "scan" / f"x{number}.png")
    labels = read(tmp_path)
    assert "count from 1" in labels.notes[0]
    assert (labels.codes[[0, 2, 3]] == 255).all()
    assert np.array_equal(labels.codes[[1, 4]], codes()[[1, 4]])
    names = ("p_11.png", "p_12.png", "p_13.png", "p_14.png", "p_15.png")
    for number in (2, 5):
        (tmp_path / "scan" / f"x{number}.png").rename(tmp_path / "scan" / f"P_1{number}_mask.png")
    named = read(tmp_path, bscans=names)
    assert named.notes == ()
    assert np.array_equal(named.codes, labels.codes)
    assert "has the number 12, its scan 5 B-scans" in refused(tmp_path)
    (tmp_path / "scan" / "p_18_mask.png").write_bytes((tmp_path / "scan" / "P_12_mask.png").read_bytes())
    assert "p_18_mask.png belongs to no B-scan" in refused(tmp_path, bscans=names)


def test_fewer_masks_than_images_of_unknown_names_need_a_mask_of_number_0(tmp_path: Path) -> None:
    table(tmp_path, _1="fluid", _2="drusen")
    (tmp_path / "scan").mkdir()
    for number in (2, 4):
        Image.fromarray(codes()[number]).save(tmp_path / "scan" / f"b_{number}.png")
    message = refused(tmp_path, bscans=None)
    assert "scan holds 2 masks for 5 B-scans that are images" in message
    assert "expected a mask for every B-scan" in message
    Image.fromarray(codes()[0]).save(tmp_path / "scan" / "b_0.png")
    assert np.array_equal(read(tmp_path, bscans=None).codes[[0, 2, 4]], codes()[[0, 2, 4]])


def test_masks_that_do_not_fit_say_which_file_and_why(tmp_path: Path) -> None:
    write_masks(tmp_path / "scan", codes())
    assert "no classes.json" in refused(tmp_path)
    table(tmp_path, _1="fluid")
    assert "2.png holds 2, which classes.json does not name" in refused(tmp_path)
    table(tmp_path, _1="fluid", _2="drusen")
    Image.fromarray(codes()[0][:, :-1]).save(tmp_path / "scan" / "3.png")
    assert "scan/3.png has 40 x 11 pixels, its scan 40 x 12" in refused(tmp_path)
    (tmp_path / "scan" / "3.png").write_bytes((tmp_path / "scan" / "2.png").read_bytes()[:60])
    assert "scan/3.png cannot be read as a mask" in refused(tmp_path)
    write_masks(tmp_path / "scan", codes()[:1], first=3)
    write_masks(tmp_path / "scan", codes()[:1], first=6)
    assert "6.png is mask 6 of a scan of 5 B-scans" in refused(tmp_path)


def test_a_tiff_with_a_page_for_each_bscan(tmp_path: Path) -> None:
    table(tmp_path, _1="fluid", _2="drusen")
    pages = [Image.fromarray(mask) for mask in codes()]
    pages[0].save(tmp_path / "scan.tif", save_all=True, append_images=pages[1:])
    assert np.array_equal(read(tmp_path).codes, codes())
    pages[0].save(tmp_path / "scan.tif", save_all=True, append_images=pages[1:4])
    assert "has 4 pages, its scan 5 B-scans" in refused(tmp_path)
    (tmp_path / "scan.tif").unlink()
    (tmp_path / "scan").mkdir()
    pages[0].save(tmp_path / "scan" / "marks.tif", save_all=True, append_images=pages[1:])
    assert np.array_equal(read(tmp_path).codes, codes())
    pages[0].save(tmp_path / "scan" / "marks.tif", save_all=True, append_images=pages[1:4])
    assert "marks.tif has 4 pages: expected a single file with a page for each B-scan" in refused(tmp_path)
    (tmp_path / "scan" / "marks.tif").rename(tmp_path / "scan" / "2.tif")
    pages[0].save(tmp_path / "scan" / "3.tif")
    assert "2.tif has 4 pages: expected a single file" in refused(tmp_path)


def test_one_hot_arrays(tmp_path: Path) -> None:
    hot = np.stack([codes() == k for k in range(3)], -1)
    np.savez(tmp_path / "scan.npz", labels=hot, names=np.array(["fluid", "drusen"]))
    assert np.array_equal(read(tmp_path).codes, codes())
    hot[0, 0, 0] = False  # no channel: not labelled
    np.savez(tmp_path / "scan.npz", labels=hot, names=np.array(["fluid", "drusen"]))
    assert read(tmp_path).codes[0, 0, 0] == 255
    np.savez(tmp_path / "scan.npz", labels=hot[..., 1:], names=np.array(["fluid", "drusen"]))
    assert np.array_equal(read(tmp_path).codes, codes())
    hot[1, 20, 0, 1] = True
    np.savez(tmp_path / "scan.npz", labels=hot, names=np.array(["fluid", "drusen"]))
    assert "as two classes" in refused(tmp_path)


def test_capital_letters_of_a_suffix_do_not_matter(tmp_path: Path) -> None:
    hot = np.stack([codes() == k for k in range(3)], -1)
    np.savez(tmp_path / "scan.npz", labels=hot, names=np.array(["fluid", "drusen"]))
    (tmp_path / "scan.npz").rename(tmp_path / "scan.NPZ")
    assert np.array_equal(read(tmp_path).codes, codes())


def test_layers_and_fluid_of_two_files_are_one_label(tmp_path: Path) -> None:
    """The layout of the Duke eyes: what no grader looked at is not labelled where a mask holds 0; its marks count."""
    np.savez(tmp_path / "scan_layers.npz", layers=layers().transpose(1, 0, 2))
    np.savez(tmp_path / "scan_fluid.npz", fluid=fluid())
    labels = read(tmp_path, "scan_5x40x12.dcm")
    assert labels.names == (*LAYER_CLASSES, "fluid")
    assert labels.boundaries_px is not None
    assert np.allclose(labels.boundaries_px, layers(), equal_nan=True)
    assert (labels.codes[1:4, 17:22, 4:8] == 8).all()
    assert np.array_equal(labels.codes[3] == 255, fluid()[3] == 0)
    assert (labels.codes[:, :, 0] == 255).all()
    column = labels.codes[0, :, 5]
    assert [int(k) for k in column[[0, 3, 4, 7, 8, 33, 34]]] == [0, 0, 1, 1, 2, 7, 0]


def test_files_under_several_keys_of_a_scan(tmp_path: Path) -> None:
    """Different classes are read together; of the same classes one file is read, and the other is named."""
    scan, others = ScanNames("1.2.3", "some/scan.dcm", "0"), ScanNames("1.2.4", "some/other.dcm", "1")
    np.savez(tmp_path / "1.2.3.npz", labels=fluid(), names=np.array(["fluid"]))
    np.savez(tmp_path / "scan_boundaries.npz", rows=layers(), names=np.array(BOUNDARIES))
    np.savez(tmp_path / "strange.npz", labels=fluid(), names=np.array(["fluid"]))
    folder = LabelFolder(tmp_path)
    file = folder.file_for(scan)
    assert file == tmp_path / "1.2.3.npz"
    labels = folder.read(file, folder.names(file), SHAPE)
    assert labels.boundaries_px is not None
    assert np.allclose(labels.boundaries_px, layers(), equal_nan=True)
    assert (labels.codes[1:4, 17:22, 4:8] == labels.names.index("fluid") + 1).all()
    assert (folder.unused({file}), folder.passed_over, folder.file_for(others)) == (1, set(), None)
    np.savez(tmp_path / "scan_fluid.npz", fluid=fluid())
    folder = LabelFolder(tmp_path)
    file = folder.file_for(scan)
    assert file == tmp_path / "scan_boundaries.npz"  # with that of the fluid it holds all classes
    assert folder.parts(file) == [file, tmp_path / "scan_fluid.npz"]
    assert (folder.unused({file}), folder.passed_over) == (1, {tmp_path / "1.2.3.npz"})


def test_labels_are_turned_with_their_picture(tmp_path: Path) -> None:
    drawn = np.zeros((1, 40, 12), np.uint8)
    drawn[:, 6:10], drawn[:, 10:20], drawn[:, 12:15, 4:6] = 1, 2, 3
    expected = LabelVolume(drawn, ("rnfl", "gcl_ipl", "fluid"), boundaries_px=None)
    np.savez(tmp_path / "scan.npz", labels=drawn[:, ::-1], names=np.array(expected.names))
    folder = LabelFolder(tmp_path, of_bscans=True)
    made = folder.read(tmp_path / "scan.npz", expected.names, drawn.shape, is_turned=True)
    assert np.array_equal(made.codes, drawn)
    assert made.boundaries_px is not None
    assert (made.boundaries_px[:3, 0, 0] == [5.5, 9.5, 19.5]).all()
    rows = layers()[:, :1]
    for stored in (rows, 39 - rows):  # octjepa writes the boundaries of such a picture upright
        np.savez(tmp_path / "scan.npz", rows=stored, names=np.array(BOUNDARIES))
        made = folder.read(tmp_path / "scan.npz", LAYER_CLASSES, drawn.shape, is_turned=True)
        assert made.boundaries_px is not None
        assert np.allclose(made.boundaries_px, rows, equal_nan=True)


def test_duke_mat_files(tmp_path: Path) -> None:
    manual = layers().transpose(0, 2, 1)
    manual[:, :, 4] = 0  # ungraded B-scans are filled with zeros in some files
    marks = np.where(np.isnan(layers()[:1]).transpose(1, 0, 2), np.nan, fluid()).transpose(1, 2, 0)
    savemat(
        tmp_path / "scan.mat", {"manualLayers1": manual, "manualFluid1": marks * 3, "images": np.zeros((40, 12, 5))}
    )
    labels = read(tmp_path)
    assert labels.boundaries_px is not None
    assert np.isnan(labels.boundaries_px[:, 3:]).all()
    assert np.allclose(labels.boundaries_px[:, :3], layers()[:, :3], equal_nan=True)
    assert (labels.codes[[1, 2], 17:22, 4:8] == 8).all()
    assert (labels.codes[3] == 255).all()
    maps = np.stack([layers()[k] for k in (0, 6, 7)], -1)
    savemat(tmp_path / "scan.mat", {"layerMaps": maps})
    amd = read(tmp_path)
    assert amd.boundaries_px is not None
    assert np.isfinite(amd.boundaries_px[[0, 6, 7], 0, 1]).all()
    assert np.isnan(amd.boundaries_px[1:6]).all()
    assert (amd.codes[0, 10:20, 5] == 255).all()  # between ILM and RPE nothing is known
    savemat(tmp_path / "scan.mat", {"images": np.zeros((40, 12, 5))})
    assert "scan.mat holds no labels" in refused(tmp_path)


def test_lines_of_heyex(tmp_path: Path) -> None:
    def line(name: str, rows: np.ndarray) -> str:
        points = " ".join(f"{3e38 if np.isnan(row) else row:g}" for row in rows)
        return f"<SegLine><Name>{name}</Name><Array>{points}</Array></SegLine>"

    images = "".join(
        "<Image><ImageType><Type>OCT</Type></ImageType><OphthalmicAcquisitionContext><Width>12</Width><Height>40</Height>"
        "</OphthalmicAcquisitionContext><Segmentation>"
        + "".join(line(name, layers()[k, bscan]) for k, name in ((0, "ILM"), (2, "IPL"), (7, "BM")))
        + "</Segmentation></Image>"
        for bscan in range(SHAPE[0])
    )
    (tmp_path / "scan.xml").write_text(f"<HEDX><BODY><Series>{images}</Series></BODY></HEDX>")
    labels = read(tmp_path)
    assert labels.boundaries_px is not None
    assert np.allclose(labels.boundaries_px[[0, 2, 7]], layers()[[0, 2, 7]], equal_nan=True)
    assert np.isnan(labels.boundaries_px[[1, 3, 4, 5, 6]]).all()
    (tmp_path / "scan.xml").write_text(
        "<HEDX><BODY><Series>" + images.replace("4 4 4", "4 4", 1) + "</Series></BODY></HEDX>"
    )
    assert "line ILM of B-scan 1 has 11 points, not 12" in refused(tmp_path)


def test_annotations_of_eyepy(tmp_path: Path) -> None:
    def write(names: list[str]) -> None:
        with zipfile.ZipFile(tmp_path / "scan.eye", "w") as archive:
            for kind, stored, values, called in (
                ("layers", "layer_heights", layers()[[0, 7]], names),
                ("voxels", "voxel_maps", fluid()[None] > 0, ["drusen"]),
            ):
                data = BytesIO()
                np.save(data, values)
                archive.writestr(f"annotations/{kind}/{stored}.npy", data.getvalue())
                archive.writestr(f"annotations/{kind}/meta.json", json.dumps([{"name": name} for name in called]))

    write(["ILM", "BM"])
    labels = read(tmp_path)
    assert labels.boundaries_px is not None
    assert np.allclose(labels.boundaries_px[[0, 7]], layers()[[0, 7]], equal_nan=True)
    assert (labels.codes[1, 17:22, 4:8] == len(LAYER_CLASSES) + 1).all()
    assert (labels.codes[3] == 255).all()
    write(["first", "second"])
    assert "expected at least one of ilm" in refused(tmp_path)
    write(["ILM"])
    assert "layers/meta.json describes 1 arrays: expected 2 objects with a `name`" in refused(tmp_path)


@pytest.mark.parametrize("described", [["ILM"], {"name": "ILM"}])
def test_an_eyepy_file_whose_layers_have_no_names_says_what_is_expected(tmp_path: Path, described: object) -> None:
    data = BytesIO()
    np.save(data, layers()[[0]])
    with zipfile.ZipFile(tmp_path / "scan.eye", "w") as archive:
        archive.writestr("annotations/layers/layer_heights.npy", data.getvalue())
        archive.writestr("annotations/layers/meta.json", json.dumps(described))
    assert "scan.eye: annotations/layers/meta.json is not a list of objects: expected 1" in refused(tmp_path)


def test_single_values_instead_of_arrays_say_what_is_expected(tmp_path: Path) -> None:
    names = np.array(["fluid", "drusen"])
    np.savez(tmp_path / "scan.npz", labels=codes(), names=names, spacing_mm=np.array(0.004))
    assert "scan.npz: `spacing_mm` has the shape () and the type float64: expected 3 numbers" in refused(tmp_path)
    np.savez(tmp_path / "scan.npz", labels=codes(), names=names, fovea_mm=np.array(["a", "b"]))
    assert "expected 2 numbers (slice, column)" in refused(tmp_path)
    np.savez(tmp_path / "scan.npz", layers=layers(), layer_names=np.array("ilm"))
    assert "expected 1 boundaries (ilm)" in refused(tmp_path)


def test_the_source_is_that_of_the_nearest_classes(tmp_path: Path) -> None:
    (tmp_path / "one_hot" / "scan" / "fluid").mkdir(parents=True)
    Image.fromarray(codes()[0]).save(tmp_path / "one_hot" / "scan" / "fluid" / "1.png")
    write_masks(tmp_path / "inside" / "scan", codes())
    (tmp_path / "inside" / "scan" / "classes.json").write_text('{"1": "fluid", "2": "drusen", "source": "a grader"}')
    for kind, source in (("one_hot", ""), ("inside", "a grader")):
        labels = LabelFolder(tmp_path / kind)
        assert labels.source(tmp_path / kind / "scan") == source


def test_layers_of_another_shape_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "scan.npz", layers=layers()[:, :, :-1])
    assert "scan.npz holds boundaries of 5 B-scans and 11 columns, its scan 5 x 40 x 12" in refused(tmp_path)
    np.savez(tmp_path / "scan.npz", layers=layers()[:7])
    assert "expected 8 boundaries" in refused(tmp_path)


@pytest.mark.parametrize("swapped", [False, True])
def test_layers_of_as_many_bscans_as_boundaries_are_read_along_the_ascending_axis(
    tmp_path: Path, swapped: bool
) -> None:
    rows = np.broadcast_to(ROWS[:, None, None] - np.arange(8)[None, :, None] / 4, (8, 8, 12)).astype(np.float32)
    rows[:, 3] = 0  # a B-scan without grades
    for name in ("layers", "rows"):
        np.savez(tmp_path / "scan.npz", **{name: rows.swapaxes(0, 1) if swapped else rows})
        folder = LabelFolder(tmp_path)
        found = folder.read(tmp_path / "scan.npz", LAYER_CLASSES, (8, 40, 12)).boundaries_px
        assert found is not None
        assert np.array_equal(found[:, :3], rows[:, :3])
        assert np.isnan(found[:, 3]).all()


@pytest.mark.parametrize("name", ["layers", "rows"])
def test_where_rows_ascend_along_both_axes_the_documented_order_holds(tmp_path: Path, name: str) -> None:
    rows = np.broadcast_to(ROWS[:, None, None] + np.arange(8)[None, :, None] / 4, (8, 8, 12)).astype(np.float32)
    np.savez(tmp_path / "scan.npz", **{name: rows.swapaxes(0, 1) if name == "layers" else rows})
    found = LabelFolder(tmp_path).read(tmp_path / "scan.npz", LAYER_CLASSES, (8, 40, 12)).boundaries_px
    assert np.array_equal(found, rows)


def test_what_octjepa_writes_is_read_as_labels(tmp_path: Path) -> None:
    """Boundaries that were corrected by hand, in the file of `octjepa segment`."""
    np.savez(
        tmp_path / "scan_boundaries.npz",
        rows=layers(),
        names=np.array(BOUNDARIES),
    )
    labels = read(tmp_path)
    assert labels.boundaries_px is not None
    assert np.allclose(labels.boundaries_px, layers(), equal_nan=True)


def test_pictures_beside_label_files_are_not_masks(tmp_path: Path) -> None:
    """The folder that `octjepa segment` writes holds a picture of every scan."""
    np.savez(tmp_path / "scan_boundaries.npz", rows=layers(), names=np.array(BOUNDARIES))
    Image.fromarray(np.zeros((600, 900), np.uint8)).save(tmp_path / "scan.png")
    assert read(tmp_path).names == LAYER_CLASSES


def test_the_real_duke_labels(real_scans: Path) -> None:
    folder = real_scans.parent / "real" / "duke_dme_more"
    if not folder.is_dir():
        pytest.skip("no further Duke eyes")
    labels = LabelFolder(folder)
    file = labels.file_for(ScanNames("", "duke_dme_eye02_11x496x768.dcm", ""))
    assert file is not None
    made = labels.read(file, labels.names(file), (11, 496, 768))
    marked = np.load(folder / "duke_dme_eye02_fluid.npz")["fluid"] > 0
    graded = np.isfinite(np.load(folder / "duke_dme_eye02_layers.npz")["layers"]).any(1)
    assert made.boundaries_px is not None
    assert np.array_equal(np.isfinite(made.boundaries_px).any(0), graded)
    code = made.names.index("fluid") + 1
    assert np.array_equal(made.codes == code, marked)
    assert (made.codes[~np.broadcast_to(graded[:, None], made.codes.shape) & ~marked] == 255).all()


def test_boundaries_of_layer_masks() -> None:
    """An edge that touches fluid says nothing about the boundary."""
    drawn = np.zeros(SHAPE, np.uint8)
    drawn[:, 4:8], drawn[:, 8:20] = 1, 2
    drawn[1:3, 17:24, 4:8] = 3
    drawn[4] = 255
    rows = boundaries_of_codes(drawn, ("RNFL", "choroid", "fluid"))
    assert rows is not None
    assert (rows[0, :4] == 3.5).all()
    assert (rows[1, :4] == 7.5).all()
    assert np.isnan(rows[:, 4]).all()
    rows = boundaries_of_codes(drawn, ("rnfl", "inl", "fluid"))
    assert rows is not None
    assert (rows[3, 0] == 19.5).all()
    assert np.isnan(rows[3, 1, 4:8]).all()
    assert boundaries_of_codes(drawn, ("drusen", "cyst", "fluid")) is None


def test_names() -> None:
    found = [
        boundary_index(name)
        for name in ("ILM", "NFL/GCL", "IPL-INL", "inl_opl", "OPL", "IS/OS", "RPE", "Bruch's membrane")
    ]
    assert found == list(range(8))
    assert boundary_index("vitreous") is None
    assert [class_set(name) for name in ("Fluid", "IRF", "srf", "PED", "vessel")] == [6, 2, 4, 8, 0]


def test_masks_beside_the_images_of_a_scan_are_not_bscans(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_masks(tmp_path, rng.integers(0, 255, SHAPE, np.uint8), "{}.png")
    write_masks(tmp_path, codes(), "{}_mask.png")
    assert frame_names(tmp_path) == [f"{number}.png" for number in range(1, 6)]
    assert read_images(tmp_path).pixels.shape == SHAPE
    table(tmp_path, _1="fluid", _2="drusen")
    assert np.array_equal(read_masks(tmp_path, SHAPE, frame_names(tmp_path)).codes, codes())
