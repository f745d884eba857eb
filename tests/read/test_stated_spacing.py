"""A spacing that the user states is used where the scan's extent allows it: down-sampled cubes have a coarse one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from eye_files import phantom, write_sidecar, write_voxels
from octjepa.errors import UsageError, VolumeRejected
from octjepa.read.orientation import has_slice_direction
from octjepa.read.reader import parse_spacing, read_volume
from octjepa.read.single_bscan import read_bscan_volume
from vendor_files import write_heyex_xml

PIXELS, SPACING = phantom()


def cube(path: Path, shape: tuple[int, int, int]) -> Path:
    """The phantom, sampled to `shape`."""
    picks = [np.linspace(0, length - 1, count).astype(int) for length, count in zip(PIXELS.shape, shape, strict=True)]
    np.save(path, PIXELS[np.ix_(*picks)])
    return path


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((64, 128, 64), "0.09375,0.015625,0.09375"),  # Cirrus cubes of 6 x 2 x 6 mm, sampled down
        ((200, 200, 200), "0.030151,0.0100502515,0.030151"),  # FairVision: 2 mm over 199 gaps
    ],
)
def test_a_coarse_spacing_that_is_stated_wins(tmp_path: Path, shape: tuple[int, int, int], text: str) -> None:
    path = cube(tmp_path / "cube.npy", shape)
    stated = parse_spacing(text)
    assert stated != "file"
    volume = read_volume(path, spacing_mm=stated)
    assert (volume.shape, volume.spacing_mm) == (shape, stated)
    assert volume.provenance == dict.fromkeys(("slice", "depth", "column"), "option")
    assert "spacing_coarse_as_stated" in volume.notes
    write_sidecar(tmp_path / "cube.json", spacing_mm=stated)
    beside = read_volume(path)
    assert beside.spacing_mm == pytest.approx(stated)
    assert "spacing_coarse_as_stated" in beside.notes
    (tmp_path / "cube.json").unlink()
    with pytest.raises(VolumeRejected, match="spacing_unknown"):
        read_volume(path)


def test_a_stated_spacing_that_makes_no_scan_is_refused(tmp_path: Path) -> None:
    path = cube(tmp_path / "cube.npy", (64, 128, 64))
    for spacing, words in (
        ((0.09375, 0.03, 0.09375), ""),  # 3.8 mm of depth can be
        ((0.09375, 0.049, 0.49), "column make 31.4 mm"),
        ((0.09, 0.0005, 0.09), "depth make 0.064 mm"),
    ):
        if not words:
            assert read_volume(path, spacing_mm=spacing).spacing_mm == spacing
            continue
        with pytest.raises(VolumeRejected, match=f"spacing_unknown: .*{words}"):
            read_volume(path, spacing_mm=spacing)
    with pytest.raises(UsageError, match="the other way round"):
        parse_spacing("0.12,0.0117,0.0039")


def test_a_spacing_of_zero_beside_a_scan_does_not_stand_for_that_of_its_header(tmp_path: Path) -> None:
    path = write_voxels(tmp_path / "scan.nii.gz", PIXELS, SPACING)
    write_sidecar(tmp_path / "scan.json", spacing_mm=[0, 0, 0])
    with pytest.raises(VolumeRejected, match=r"spacing_unknown: .*sidecar \(slice, depth, column\) = \(0, 0, 0\)"):
        read_volume(path)


def test_a_json_next_to_a_scan_comes_before_the_positions_in_it(tmp_path: Path) -> None:
    path = write_heyex_xml(tmp_path, [PIXELS[::-1]])  # listed upwards, 0.12 mm apart
    plain = read_volume(path)
    write_sidecar(path.with_suffix(".json"), spacing_mm=[0.24, 0.003872, 0.0114])
    stated = read_volume(path)
    assert plain.provenance["slice"] == "positions"
    assert (stated.spacing_mm[0], stated.provenance["slice"]) == (0.24, "sidecar")
    assert {"positions_disagree_with_sidecar", "order_from_positions"} <= set(stated.notes)
    assert np.array_equal(stated.pixels, plain.pixels)
    assert has_slice_direction(stated)
    assert has_slice_direction(read_volume(path, spacing_mm=(0.24, 0.003872, 0.0114)))


@pytest.mark.parametrize("text", ["[0.0078, 0.04]", "[0.04, 0.0078]", "[0, 0]", "[-0.0078, 0.04]"])
def test_a_manifest_spacing_that_no_b_scan_has_is_passed_over(tmp_path: Path, text: str) -> None:
    Image.fromarray(PIXELS[12]).save(tmp_path / "a.png")
    (tmp_path / "manifest.tsv").write_text(f"person_id\tfilepath\tpixel_spacing\n1\t/a.png\t{text}\n")
    volume = read_bscan_volume(tmp_path / "a.png")
    is_used = text == "[0.0078, 0.04]"
    assert volume.provenance["depth"] == volume.provenance["column"] == ("manifest" if is_used else "assumed")
    assert ("spacing_implausible_manifest" in volume.notes) == ("depth" in volume.uncertain) == (not is_used)
