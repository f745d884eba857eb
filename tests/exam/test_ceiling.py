"""The ceiling: cells hold lesions where they are, crops keep both together, and the network learns place and answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.exam.ceiling import decoys_ceiling
from benchmarks.exam.ceiling_networks import LesionMapNet, scores, train_maps, train_small
from benchmarks.exam.decoys import DECOYS
from benchmarks.exam.labelled_scans import LabelledScans
from benchmarks.exam.map_heads import from_above, train_head
from benchmarks.exam.truth import CELL, lesion_cells, lesion_labels, lesion_shares
from sklearn.metrics import roc_auc_score

from examined_eyes import eye_table
from octjepa.canonical.native_mapping import NativeMap
from octjepa.phantom import LESIONS, SURFACES, Truth
from octjepa.recipe import Preprocessing

FINE = Preprocessing()  # of every store of the exam
SMALL = (2, 128, 16)


def cohort_with_cyst(reversed_frames: bool) -> Any:
    """One eye as native as it is stored, except for a shift of 3 along depth; a cyst in frames 4 to 7 of the truth."""
    size = FINE.stored_size
    shifts = np.full((size[0], size[2]), 3, np.int16)
    frame_mm = (np.arange(size[0]) - (size[0] - 1) / 2) * FINE.target_spacing_mm[0]
    native = NativeMap(size, FINE.target_spacing_mm, FINE, shifts, frame_mm, False)
    mask = np.zeros(size, bool)
    mask[4:8, 37:47, 60:70] = True
    known = Truth(np.zeros((len(SURFACES), size[0], size[2]), np.float32), {"intraretinal_fluid": mask}, (0.0, 0.0))
    return SimpleNamespace(
        store=SimpleNamespace(preprocessing=FINE, native_map=lambda _: native),
        ids=["eye"],
        truth=lambda _: known,
        frames=lambda _, frame: size[0] - 1 - frame if reversed_frames else frame,
    )


@pytest.mark.parametrize("reversed_frames", [False, True])
def test_cells_hold_a_lesion_where_it_is(reversed_frames: bool) -> None:
    cohort = cohort_with_cyst(reversed_frames)
    cells = lesion_cells(cohort, 0)
    number = LESIONS.index("intraretinal_fluid")
    assert cells[number].sum() * np.prod(CELL) == pytest.approx(4 * 10 * 10)
    assert not np.delete(cells, number, axis=0).any()
    slices, rows, columns = (np.unique(axis).tolist() for axis in np.nonzero(cells[number]))
    assert slices == ([8, 9, 10, 11] if reversed_frames else [4, 5, 6, 7])
    assert rows == [5, 6]  # depth 40 to 49 once shifted
    assert columns == [15, 16, 17]
    labels = lesion_labels(cohort, 0, (0, 0, 0), FINE.stored_size)
    hit = np.argwhere(labels == 1 << number)
    assert (len(hit), int((labels > 0).sum())) == (4 * 10 * 10, 4 * 10 * 10)
    first = [8 if reversed_frames else 4, 40, 60]
    assert (hit.min(axis=0).tolist(), hit.max(axis=0).tolist()) == (first, [first[0] + 3, 49, 69])
    part = lesion_labels(cohort, 0, (2, 38, 56), (12, 16, 16), 4)
    assert np.array_equal(part, labels[2:14, 38:54, 56:72][..., 2::4])
    (_, p, q), (a, b, c) = CELL, (size // cell for size, cell in zip(FINE.margin, CELL, strict=True))
    d, h, w = FINE.image_size
    grid = (d, h // p, w // q)
    shares = lesion_shares(cohort, 0, CELL, np.arange(np.prod(grid)))
    view = cells[:, a : a + d, b : b + grid[1], c : c + grid[2]]
    assert np.abs(view.reshape(len(LESIONS), -1).T - shares).max() <= 0.5  # lesion_shares looks at every 4th column
    assert np.corrcoef(view[number].ravel(), shares[:, number])[0, 1] > 0.9


def scans(count: int, margin: tuple[int, int, int] = (0, 8, 8)) -> LabelledScans:
    """Noise; every second eye has a bright cell of drusen, whose place differs, and a dark one that means nothing."""
    rng = np.random.default_rng(0)
    stored = tuple(int(n + 2 * m) for n, m in zip(SMALL, margin, strict=True))
    pixels, all_cells = [], []
    for number in range(count):
        image = rng.integers(90, 110, stored).astype(np.uint8)
        cells = np.zeros((len(LESIONS), *(n // c for n, c in zip(stored, CELL, strict=True))), np.uint8)
        for value in (255, 0) if number % 2 == 0 else (0,):
            d, r, c = rng.integers(0, 2), rng.integers(4, 14), rng.integers(2, 6)
            image[d, 8 * r : 8 * r + 8, 4 * c : 4 * c + 4] = value
            cells[0, d, r, c] = value
        pixels.append(image)
        all_cells.append(cells)
    answers = (np.arange(count)[:, None] % 2 == 0).astype(np.float32)
    return LabelledScans(pixels, [(100.0, 10.0)] * count, answers, SMALL, all_cells)


def test_crops_and_cells_move_together() -> None:
    found, rng, seen = scans(8), np.random.default_rng(1), set()
    for _ in range(6):
        views, shares = found.views_with_cells(range(8), rng)
        assert views.shape == (8, *SMALL)
        bright = (views > 5).reshape(8, 2, 16, 8, 4, 4).float().mean(dim=(3, 5))
        assert torch.equal(bright, shares[:, 0])
        seen.add(tuple(shares[0, 0].nonzero().flatten().tolist()))
    assert len(seen) > 1


@pytest.mark.slow
def test_the_network_learns_where_a_lesion_is_and_which_eye_has_it() -> None:
    found = scans(32)
    net = train_maps(found, 40, 0, "toy", rate=1e-2)
    views = found.views(range(32), None)
    with torch.inference_mode():
        maps, _ = net(views)
    cells = np.stack([cells[0, :, 3:15, 2:6] for cells in found.cells])  # of the centred view, rows 16 to 112
    assert roc_auc_score(cells.ravel() > 0, maps[:, 0].numpy().ravel()) > 0.95
    logits = scores(net.answers, found)
    assert roc_auc_score(found.answers[:, 0], logits[:, 0]) > 0.95
    mirrored = net.answers(views.flip(1, 3)).detach().numpy()
    assert np.allclose(mirrored, logits, atol=1e-4)


def test_a_question_without_an_answer_teaches_nothing() -> None:
    one = scans(16)
    two = LabelledScans(one.pixels, one.scale, np.full((16, 1), np.nan, np.float32), one.size, one.cells)
    silent = train_maps(two, 2, 0, "toy")
    torch.manual_seed(0)
    start = LesionMapNet(1)
    assert torch.allclose(silent.answer[1].bias, start.answer[1].bias, atol=1e-5)  # weight decay alone
    answered = train_maps(one, 2, 0, "toy")
    assert not torch.allclose(answered.answer[1].bias, start.answer[1].bias, atol=1e-4)


@pytest.mark.slow
def test_a_head_tells_rows_of_bumps_from_as_many_here_and_there() -> None:
    rng = np.random.default_rng(0)
    maps = torch.full((240, 1, 8, 3, 16), -6.0)
    in_row = torch.arange(240) % 2 == 0
    for eye in range(240):
        slices, columns = rng.permutation(8)[:5], rng.integers(0, 16, 5)
        if in_row[eye]:
            slices, columns = rng.integers(0, 4) + np.arange(5), np.full(5, rng.integers(0, 16))
        maps[eye, 0, torch.from_numpy(slices), 1, torch.from_numpy(columns)] = 4.0
    above = from_above(maps)
    assert above.shape == (240, 2, 8, 16)
    assert above[:, 1].sum(dim=(1, 2)).std() < 0.01  # a count says nothing
    head = train_head(above[:160], in_row[:160].float(), 0, "toy")
    with torch.inference_mode():
        assert roc_auc_score(in_row[160:], head(above[160:])) > 0.95


def test_the_small_network_learns_from_eyes_alone() -> None:
    found = scans(16)
    eyes = LabelledScans(found.pixels, found.scale, found.answers, found.size, [])
    net = train_small(eyes, 25, 0, "toy")
    assert roc_auc_score(eyes.answers[:, 0], scores(net, eyes)[:, 0]) > 0.9


def test_each_kind_of_decoy_is_a_question_about_its_own_pairs(tmp_path: Path) -> None:
    class Pairs:
        truth_folder, uses = tmp_path, tmp_path

        def __init__(self, name: str) -> None:
            self.name, self.ids = name, [str(n) for n in range(60)]
            self.people = np.array(self.ids)
            self.table = eye_table(self.ids, self.ids, ["train"] * 20 + ["test"] * 40)
            self.store = SimpleNamespace(preprocessing=SimpleNamespace(image_size=SMALL), read=self.read)

        def read(self, name: str) -> Any:
            member = int(name) % 2
            return SimpleNamespace(pixels=np.full(SMALL, member, np.uint8), tissue_mean=0.0, tissue_std=1.0)

        def indices(self, split: str) -> np.ndarray:
            assert split == "test"
            return np.arange(20, 60)

        def column(self, _: str) -> np.ndarray:
            return np.arange(60) % 2.0

    def answer(views: torch.Tensor) -> torch.Tensor:  # right of the first kind, wrong of the second, else a constant
        member = views.mean(dim=(1, 2, 3))
        return torch.stack([member, -member, 0 * member, 0 * member], dim=1)

    cohorts: list[Any] = [Pairs(name) for name in DECOYS]
    found = {one.metric: one for one in decoys_ceiling(cohorts, answer, None)}
    values = [found[f"auroc_{name}"].estimate.value for name in DECOYS]
    assert values == [1.0, 0.0, 0.5, 0.5]
    assert found["auroc"].estimate.value == 0.5
    assert {one.labels for one in found.values()} == {None}
