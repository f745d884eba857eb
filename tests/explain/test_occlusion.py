"""A map peaks where the answer hangs and is zero everywhere else; nothing of what is left out is seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from layered_eye import COLUMNS, FRAMES, PREPROCESSING, eye
from octjepa.canonical.native_mapping import NativeMap
from octjepa.canonical.pipeline import canonicalise
from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.pretrained import SelectedTokens
from octjepa.errors import UsageError
from octjepa.explain import occlusion
from octjepa.explain.occlusion import Occlusion, Predict, occlude, predict_without
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe
from octjepa.tasks.finetune.folder import HeadSpec
from octjepa.tasks.finetune.network import TunedNetwork
from octjepa.tasks.finetune.predict import TunedModel
from synthetic import small_recipe, volume

GRID = (4, 6, 8)
TOKEN_MM = (1.44, 0.125, 0.75)  # of `tiny_cpu`: a place is 1 x 1 x 3 tokens
PLANTED = (2, 3, 5)
TISSUE_ROWS = slice(2, 5)


def drop(whole: np.ndarray, rest: np.ndarray) -> np.ndarray:
    return whole[0] - rest[:, 0]


def everything(left: tuple[int, ...] = ()) -> SelectedTokens:
    """All tokens of the grid but `left`; tissue in `TISSUE_ROWS`. A token's patch is its place in raster order."""
    index = np.setdiff1d(np.arange(np.prod(GRID)), left)
    positions = np.stack(np.unravel_index(index, GRID), axis=-1)
    tissue = np.isin(positions[:, 1], np.arange(6)[TISSUE_ROWS]).astype(np.float32)
    patches = index[:, None].astype(np.float32).repeat(3, axis=1)
    return SelectedTokens(patches, positions.astype(np.float32), index, GRID, tissue)


def is_there(location: tuple[int, int, int]) -> Predict:
    """1 where the token at `place` is among those given, else 0."""
    wanted = torch.tensor(location, dtype=torch.float32)
    return lambda patches, positions: (positions == wanted).all(dim=-1).any(dim=1, keepdim=True).float()


def mapped(answer: Predict, selected: SelectedTokens | None = None, seed: int = 0) -> Occlusion:
    return occlude(selected or everything(), answer, drop, TOKEN_MM, np.random.default_rng(seed))


def test_the_map_peaks_at_the_planted_position_and_is_zero_elsewhere() -> None:
    found = mapped(is_there(PLANTED))
    s, r, c = PLANTED
    en_face, b_scan = np.zeros((4, 8)), np.full((6, 8), np.nan)
    en_face[s, c - 1 : c + 2] = 1  # the place is three tokens wide
    b_scan[TISSUE_ROWS] = 0
    b_scan[r, c - 1 : c + 2] = 1
    np.testing.assert_array_equal(found.en_face, en_face)
    np.testing.assert_array_equal(found.b_scan, b_scan)
    assert found.slab == s
    assert found.background == 0


def test_what_the_answer_ignores_changes_nothing() -> None:
    found = mapped(lambda patches, positions: torch.ones(len(patches), 1))
    assert np.nanmax(np.abs(found.en_face)) == np.nanmax(np.abs(found.b_scan)) == found.background == 0
    assert found.scattered == (0, 0)


def test_a_position_in_the_background_is_in_its_column_but_not_on_the_b_scan() -> None:
    found = mapped(is_there((1, 0, 0)))
    assert found.background == 1
    assert np.argwhere(found.en_face == 1).tolist() == [[1, 0], [1, 1]]
    assert np.nanmax(found.b_scan) == 0


def test_a_position_without_tissue_has_no_value() -> None:
    gone = tuple(np.ravel_multi_index((1, row, 4), GRID) for row in range(6)[TISSUE_ROWS])
    found = mapped(is_there((1, 3, 5)), everything(gone))
    assert np.argwhere(np.isnan(found.en_face)).tolist() == [[1, 4]]
    assert np.isnan(found.b_scan[TISSUE_ROWS, 4]).all()
    with pytest.raises(UsageError, match=r"none of 192 tokens can be left out as a region: 0 hold tissue"):
        mapped(is_there(PLANTED), everything()._replace(tissue=np.zeros(192, np.float32)))


def test_a_signed_change_is_strongest_by_its_size() -> None:
    found = mapped(lambda p, c: 1 * is_there((0, 3, 1))(p, c) - 2 * is_there((3, 3, 6))(p, c))
    assert (found.slab, found.column) == (3, 5)
    assert (np.nanmin(found.en_face), np.nanmax(found.en_face)) == (-2, 1)


def test_chance_leaves_out_as_many_tokens_of_each_kind() -> None:
    """An answer that only counts cannot tell a place from as many tokens at random."""
    counts = mapped(lambda patches, positions: torch.full((len(patches), 1), float(patches.shape[1])))
    strongest = np.nanmax(counts.en_face)
    assert strongest == 18  # three columns of six rows
    assert counts.scattered == (18, 3)
    tissue = everything().tissue > 0

    def tissue_left(patches: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(tissue)[patches[..., 0].long()].sum(dim=1, keepdim=True).float()

    assert mapped(tissue_left).scattered == (9, 3)


def test_a_position_spans_a_millimetre_in_whole_tokens() -> None:
    assert occlusion.region_radius(TOKEN_MM) == (0, 0, 1)
    assert occlusion.region_radius((0.75, 0.064, 0.376)) == (1, 1, 1)
    assert occlusion.region_radius((0.2, 0.02, 0.2)) == (2, 2, 2)
    for size in (0.05, 0.1, 0.33, 0.5, 1.0, 3.0):
        tokens = 2 * occlusion.region_radius((size, size, size))[0] + 1
        assert tokens * size >= 1 - 1e-9
        assert tokens == 1 or (tokens - 2) * size < 1


@pytest.fixture(scope="module")
def encoder() -> PretrainedEncoder:
    return encoder_of(small_recipe())


def encoder_of(recipe: Recipe) -> PretrainedEncoder:
    torch.manual_seed(2)
    return PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, "small")


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_the_answer_is_that_of_an_encoder_which_never_saw_the_position(encoder: PretrainedEncoder, batch: int) -> None:
    one = encoder.select_tokens(volume(encoder.recipe.preprocessing, 3))
    patches, positions = torch.from_numpy(one.patches), torch.from_numpy(one.positions)
    rng = np.random.default_rng(0)
    left_out = np.stack([rng.permutation(len(patches)) < count for count in (3, 0, 5, 3, 1, 5, 3)])

    def answer(p: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return encoder.encoder(p, c).mean(dim=1)

    found = predict_without(answer, patches, positions, left_out, batch)
    for row, out in zip(found, left_out, strict=True):
        alone = encoder.encoder(patches[~out][None], positions[~out][None]).mean(dim=1)[0].detach()
        assert np.abs(row - alone.numpy()).max() < 1e-5
    poisoned = patches.clone()
    poisoned[left_out[0]] = torch.nan
    unseen = predict_without(answer, poisoned, positions, left_out[:1], batch)
    np.testing.assert_array_equal(unseen, predict_without(answer, patches, positions, left_out[:1], batch))
    with pytest.raises(ValueError, match="every token"):
        predict_without(answer, patches, positions, np.ones_like(left_out), batch)


def test_the_embedding_turns_by_what_the_map_says(encoder: PretrainedEncoder) -> None:
    scan = volume(encoder.recipe.preprocessing, 3)
    before = [parameter.clone() for parameter in encoder.encoder.parameters()]
    found, again = (occlusion.encoder_occlusion(encoder, scan) for _ in range(2))
    np.testing.assert_array_equal(found.en_face, again.en_face)
    assert found.scattered == again.scattered
    assert found.en_face.shape == (2, 4)
    assert found.b_scan.shape == (4, 4)
    assert np.nanmin(found.en_face) > 0
    assert found.en_face[found.slab, found.column] == np.nanmax(found.en_face)
    one = encoder.select_tokens(scan)
    steps = np.stack(np.unravel_index(one.grid_index, one.grid), axis=-1)
    retained = ~((steps[:, 0] == found.slab) & (steps[:, 2] == found.column))
    features = encoder.encoder(
        torch.from_numpy(one.patches[retained][None]), torch.from_numpy(one.positions[retained][None])
    )
    rest = features[0].detach().numpy()
    rest = np.concatenate([rest.mean(axis=0), rest.std(axis=0), rest.max(axis=0)])
    whole = encoder.embed(scan, occlusion.POOL)
    expected = 1 - whole @ rest / np.linalg.norm(whole) / np.linalg.norm(rest)
    assert found.en_face[found.slab, found.column] == pytest.approx(expected, abs=1e-5)
    assert all(torch.equal(*pair) for pair in zip(before, encoder.encoder.parameters(), strict=True))


@pytest.mark.parametrize("laterality", ["OD", "OS"])
def test_the_position_is_right_in_the_scan_as_it_came(laterality: str) -> None:
    """A bright block at the left edge of B-scans that come last, in a right eye and in a left one that is mirrored."""
    drawn = eye(laterality)
    pixels = drawn.pixels.copy()
    pixels[11:15, 60:80, 20:34] = 255
    made = canonicalise(replace(drawn, pixels=pixels, content_hash=""), PREPROCESSING)
    recipe = small_recipe(
        preprocessing=PREPROCESSING.model_dump(), tokens={"patch_size": [2, 8, 8], "select": "all", "budget": None}
    )
    one = encoder_of(recipe).select_tokens(made.volume)
    bright = float(one.patches.mean(axis=1).max()) - 0.5  # fully within the block
    found = occlude(
        one,
        lambda patches, positions: (patches.mean(dim=-1) > bright).sum(dim=1, keepdim=True).float(),
        drop,
        occlusion.patch_mm(recipe),
        np.random.default_rng(0),
    )
    assert np.nanmin(found.en_face) == 0  # most positions have nothing to do with it
    native = NativeMap(
        drawn.shape, drawn.spacing_mm, PREPROCESSING, made.volume.frame_shifts, made.volume.frame_mm, made.mirrored
    )
    assert native.mirrored == (laterality == "OS")
    (z, _, x), (a, _, c) = recipe.tokens.patch_size, PREPROCESSING.margin
    # the middle of all columns without which something changes
    slab, column = (np.argwhere(found.en_face > 0) + 0.5).mean(axis=0)
    location = native.to_native(np.array([[a + slab * z - 0.5, 60.0, c + column * x - 0.5]]))[0]
    assert location[0] == pytest.approx(12.5, abs=2.5)
    assert location[2] == pytest.approx(26.5, abs=7)  # half a token
    assert location[0] > FRAMES / 2 + 1
    assert location[2] < COLUMNS / 2 - 10


def tuned(encoder: PretrainedEncoder) -> TunedModel:
    network = TunedNetwork(encoder, [("multiclass", 3), ("regression", 0)]).eval()
    torch.manual_seed(5)
    for head in network.heads:
        torch.nn.init.normal_(head.linear.weight, std=0.02)
    heads = [
        HeadSpec("stage", "multiclass", ("a", "b", "c"), (0.0, 1.0), (0.4, -0.1, -0.3), (0.5, 0.3, 0.2)),
        HeadSpec("age", "regression", (), (60.0, 9.0), (0.0,), ()),
    ]
    return TunedModel(encoder, network, heads)


def test_of_a_tuned_network_it_is_what_its_answer_loses(encoder: PretrainedEncoder) -> None:
    network, scan = tuned(encoder), volume(encoder.recipe.preprocessing, 4)
    result, one = network.predict(scan), encoder.select_tokens(scan)
    steps = np.stack(np.unravel_index(one.grid_index, one.grid), axis=-1)
    for number, name in ((0, "b"), (1, None)):
        found = occlusion.tuned_occlusion(network, scan, number, name)
        retained = ~((steps[:, 0] == found.slab) & (steps[:, 2] == found.column))
        patches, positions_value = (torch.from_numpy(part[retained][None]) for part in (one.patches, one.positions))
        message = (
            network.network.head_outputs(network.network(patches, positions_value))[number][0].detach().double().numpy()
        )
        if name is None:
            expected = result["age"]["value"] - (60 + 9 * message[0])
        else:
            raised = np.exp(message + np.array(network.heads[0].shift))
            expected = result["stage"]["balanced"]["b"] - raised[1] / raised.sum()
        assert found.en_face[found.slab, found.column] == pytest.approx(expected, abs=1e-4)
        assert abs(expected) > 1e-3


def test_distances_are_of_directions() -> None:
    whole = np.array([1.0, 0.0])
    assert occlusion.cosine_distance(whole, np.array([[3.0, 0], [0, 2], [-1, 0]])) == pytest.approx([0, 1, 2])
    assert occlusion.median_distance(np.array([[1.0, 0], [2, 0], [0, 1]])) == pytest.approx(1)
    assert np.isnan(occlusion.median_distance(np.array([[1.0, 0]])))
