"""The packaged network on phantoms of four vendors, on a real eye, and its files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import octjepa
from octjepa.checkpoint.boundary_unet import PACKAGED
from octjepa.phantom import DEVICES, make_eye
from octjepa.phantom.random_scene import BOUNDARY_SURFACES
from octjepa.tasks.segmenter.evaluation import score_eye
from octjepa.tasks.segmenter.inference import Segmenter
from octjepa.tasks.segmenter.validation import dice_at

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def segmenter() -> Segmenter:
    return octjepa.load_segmenter()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_layers_and_fluid_of_phantoms_of_every_vendor(segmenter: Segmenter, device: str) -> None:
    errors, probability, truth = [], [], []
    for person in range(40, 60):
        eye = make_eye(11, person, "OD", device)
        if not {"intraretinal_fluid", "subretinal_fluid"} & eye.truth.masks.keys() or len(errors) == 2:
            continue
        picked = slice(4, None, 5)
        found = segmenter.predict(eye.pixels[picked], eye.spacing_mm, sparse=True)
        surfaces = eye.truth.surfaces_px[list(BOUNDARY_SURFACES)][:, picked]
        errors.append(np.abs(found.boundaries_px - surfaces).mean((1, 2)) * eye.spacing_mm[1] * 1000)
        fluid = sum(eye.truth.masks.get(f"{kind}retinal_fluid", np.zeros(1, bool)) for kind in ("intra", "sub"))
        probability.append(found.fluid.ravel().astype(np.float32))
        truth.append(np.broadcast_to(np.asarray(fluid) > 0, eye.pixels.shape)[picked].ravel())
    assert np.mean(errors) < 8
    threshold = segmenter.calibration.fluid_threshold
    assert dice_at(np.concatenate(probability), np.concatenate(truth), threshold) > 0.5


def test_neighbours_and_confidence(segmenter: Segmenter) -> None:
    eye = make_eye(11, 41, "OD", "heidelberg_spectralis")
    found = segmenter.predict(eye.pixels[8:12], (0.1, *eye.spacing_mm[1:]))
    surfaces = eye.truth.surfaces_px[list(BOUNDARY_SURFACES)][:, 8:12]
    error = np.abs(found.boundaries_px - surfaces) * eye.spacing_mm[1] * 1000
    assert error.mean() < 8
    # The network expects larger errors where it makes larger ones.
    unsure = found.expected_error_um > np.quantile(found.expected_error_um, 0.9)
    assert error[unsure].mean() > 1.3 * error[~unsure].mean()
    assert 0.3 < found.expected_error_um.mean() / error.mean() < 3
    assert found.confidence.min() >= 0
    assert found.confidence.max() <= 1


@pytest.mark.slow
def test_a_real_eye_with_oedema(segmenter: Segmenter) -> None:
    data, labels = ROOT.parent / "shared" / "data", ROOT.parent / "shared" / "labels"
    if not (data / "duke_dme_eye04_11x496x768.dcm").is_file():
        pytest.skip("no real scans next to the checkout")
    layers = np.load(labels / "duke_dme_eye04_layers.npz")["layers"]
    fluid = np.load(data / "duke_dme_eye04_fluid.npz")["fluid"] > 0
    found = segmenter.segment(data / "duke_dme_eye04_11x496x768.dcm")
    score = score_eye(found, layers, fluid)
    assert score.absolute_um.mean() < 11  # 7.3 when packaged
    assert score.dice > 0.5  # 0.63 when packaged


def test_the_packaged_files_are_small_and_say_how_they_were_made() -> None:
    assert (PACKAGED / "segmenter.safetensors").stat().st_size < 10e6
    record = json.loads((PACKAGED / "segmenter.json").read_text())
    samples, part = 0, record
    while part:  # each part of the training holds the record of the part before it
        samples, part = samples + part["progress"]["samples"], part.get("continued_from")
    assert samples > 100_000
    assert record["calibration"]["fluid_threshold"] == octjepa.load_segmenter().calibration.fluid_threshold
    assert (PACKAGED / "README.md").is_file()
