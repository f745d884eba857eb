"""Pairs of eyes alike in grey levels: what differs is the look-alike and nothing else, and folders of them balance."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from benchmarks.exam.decoys import DECOYS, Decoy, make_decoy, write_decoys

from octjepa.errors import UsageError
from octjepa.phantom import Eye, read_truth
from octjepa.phantom.anatomy import BM, EZ, ILM, RPE
from octjepa.phantom.dicom import sop_uid

SPECTRALIS, MAESTRO = "heidelberg_spectralis", "topcon_maestro2"
KINDS = tuple(DECOYS)
_Pair = tuple[Eye, Eye]


@pytest.fixture(scope="module")
def pairs() -> dict[Decoy, list[_Pair]]:
    """Three pairs of each kind, (decoy, lesion)."""
    return {kind: [_pair(kind, person) for person in (1, 2, 7)] for kind in KINDS}


def _pair(kind: Decoy, person: int, device: str = SPECTRALIS) -> _Pair:
    members: tuple[Literal[0, 1], ...] = (0, 1)
    decoy, lesion = (make_decoy(5, person, kind, member, "OD", device) for member in members)
    return decoy, lesion


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_differs_in_the_lesion_alone(kind: Decoy, pairs: dict[Decoy, list[_Pair]]) -> None:
    for decoy, lesion in pairs[kind]:
        assert lesion.truth.masks.keys() == {DECOYS[kind]} == lesion.person.lesions["OD"].keys()
        assert decoy.truth.masks == decoy.person.lesions["OD"] == {}
        assert decoy.truth.fovea_mm == lesion.truth.fovea_mm
        assert sop_uid(5, decoy) != sop_uid(5, lesion)
        other = np.abs(decoy.pixels.astype(int) - lesion.pixels) > 8
        moved = np.abs(decoy.truth.surfaces_px - lesion.truth.surfaces_px).max(axis=0) > 0.01
        touched = moved | lesion.truth.masks[DECOYS[kind]].any(axis=1)
        assert other.any()
        # Away from both, pixels are alike, speckle and noise included; the choroid is the same everywhere.
        assert (other & ~touched[:, None]).mean() < 0.002
        assert np.array_equal(decoy.truth.surfaces_px[BM:], lesion.truth.surfaces_px[BM:])


def test_decoys_are_a_pure_function() -> None:
    first, again = (make_decoy(5, 1, "fluid_or_ped", 0, "OS", MAESTRO) for _ in range(2))
    assert np.array_equal(first.pixels, again.pixels)
    assert sop_uid(5, first) == sop_uid(5, again)
    assert not np.array_equal(first.pixels, make_decoy(5, 2, "fluid_or_ped", 0, "OS", MAESTRO).pixels)


@pytest.mark.parametrize("kind", KINDS)
def test_the_intensities_of_a_pair_are_alike(kind: Decoy, pairs: dict[Decoy, list[_Pair]]) -> None:
    """Mean, spread and percentiles of depth bands around the retina differ by a fraction of what eyes differ by."""

    def bands(eye: Eye) -> np.ndarray:
        start = int(eye.truth.surfaces_px[ILM].min()) - 12
        middle = eye.pixels[:, start : start + 96, 40:120].reshape(len(eye.pixels), 6, 16, -1)
        values = middle.transpose(1, 0, 2, 3).reshape(6, -1).astype(np.float64)
        return np.stack([values.mean(axis=1), values.std(axis=1), *np.percentile(values, (5, 95), axis=1)])

    table = np.array([[bands(eye) for eye in pair] for pair in pairs[kind]])  # [pair, member, statistic, band]
    apart = np.abs(table[:, 1] - table[:, 0]).max(axis=(0, 2))
    assert (apart < (4, 4, 6, 7)).all(), apart  # grey levels of 255
    assert np.abs(table[:, 1] - table[:, 0]).mean() < 0.2 * table[:, 0].std(axis=0).mean()


def test_the_bands_are_as_dark_as_the_cysts_and_elsewhere(pairs: dict[Decoy, list[_Pair]]) -> None:
    for decoy, lesion in pairs["cyst_or_thinning"]:
        change = decoy.pixels.astype(int) - lesion.pixels
        assert abs(change.sum()) < 0.2 * np.abs(change).sum()
        # Bands are where there was no cyst as well: they are not copy of them.
        cysts = lesion.truth.masks["intraretinal_fluid"]
        assert (change[~cysts] < -25).sum() > 0.2 * cysts.sum()


def test_the_wave_has_the_heights_of_the_drusen_without_their_domes(pairs: dict[Decoy, list[_Pair]]) -> None:
    for decoy, lesion in pairs["drusen_or_wave"]:
        heights = [one.truth.surfaces_px[BM] - one.truth.surfaces_px[RPE] for one in (decoy, lesion)]
        assert np.sort(heights[0], axis=None) == pytest.approx(np.sort(heights[1], axis=None), abs=0.01)
        up_and_down = [np.abs(np.diff(height, axis=1)).sum() for height in heights]
        bent = [np.abs(np.diff(height, 2, axis=1)).sum() for height in heights]
        assert up_and_down[0] < 0.8 * up_and_down[1]
        assert bent[0] < 0.75 * bent[1]


def test_fluid_is_above_the_rpe_or_below(pairs: dict[Decoy, list[_Pair]]) -> None:
    for decoy, lesion in pairs["fluid_or_ped"]:
        below = [one.truth.surfaces_px[BM] - one.truth.surfaces_px[RPE] for one in (decoy, lesion)]
        above = [one.truth.surfaces_px[RPE] - one.truth.surfaces_px[EZ] for one in (decoy, lesion)]
        lens = lesion.truth.masks["subretinal_fluid"].sum(axis=1)
        assert below[0] - below[1] == pytest.approx(lens, abs=1.01)
        assert above[1] - above[0] == pytest.approx(lens, abs=1.01)


def test_the_hyaloid_hangs_over_an_ilm_without_folds(pairs: dict[Decoy, list[_Pair]]) -> None:
    for decoy, lesion in pairs["membrane_or_hyaloid"]:
        sheet = lesion.truth.masks["epiretinal_membrane"].any(axis=1)
        bent = [
            np.abs(np.diff(one.truth.surfaces_px[ILM], 2, axis=1))[sheet[:, 1:-1]].mean() for one in (decoy, lesion)
        ]
        assert bent[0] < 0.5 * bent[1]
        frame, column = np.argwhere(sheet)[len(np.argwhere(sheet)) // 2]
        scan = decoy.pixels[frame, :, column - 6 : column + 7].astype(float)
        rows = decoy.truth.surfaces_px[ILM][frame, column - 6 : column + 7]
        just_above = np.mean([scan[int(row) - 1, k] for k, row in enumerate(rows)])
        higher = np.mean([scan[int(row) - 5 : int(row) - 2, k].max() for k, row in enumerate(rows)])
        assert higher > 1.3 * just_above


@pytest.mark.slow
def test_a_folder_of_decoys_is_a_balanced_cohort(tmp_path: Path) -> None:
    devices = (SPECTRALIS, MAESTRO)
    counts = write_decoys(tmp_path / "a", "drusen_or_wave", 12, 3, devices, split_shares=(0.5, 0.0, 0.5))
    assert counts == {"people": 12, "volumes": 12, "files": 12}
    with (tmp_path / "a" / "truth" / "eyes.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    with (tmp_path / "a" / "participants.tsv").open(encoding="utf-8", newline="") as file:
        split = {row["participant_id"]: row["recommended_split"] for row in csv.DictReader(file, delimiter="\t")}
    assert {row["decoy_kind"] for row in rows} == {"drusen_or_wave"}
    groups: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        assert row["drusen"] == row["decoy_member"]
        assert (float(row["drusen_mm3"]) > 0) == (row["decoy_member"] == "1")
        groups.setdefault((split[row["person_id"]], row["device"]), Counter())[row["decoy_member"]] += 1
        truth = read_truth(tmp_path / "a" / "truth" / f"{row['sop_instance_uid']}.npz")
        assert bool(truth.masks) == (row["decoy_member"] == "1")
    assert len(groups) == 4
    assert all(abs(members["0"] - members["1"]) <= 1 for members in groups.values())
    assert Counter(row["decoy_member"] for row in rows) == {"0": 6, "1": 6}
    assert {row["eye"] for row in rows} == {"OD", "OS"}


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cyst_or_thinning"):
        make_decoy(0, 0, "cyst", 0, "OD", SPECTRALIS)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cyst_or_thinning"):
        write_decoys(tmp_path / "a", "cyst", 4)  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()
