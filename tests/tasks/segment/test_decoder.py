"""The decoder learns what its tokens and the volume tell, only where labels are, and leaves a frozen encoder alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.recipe import ViewRecipe
from octjepa.tasks.segment import decoder
from octjepa.tasks.segment.dice import dice, mean_dice, voxel_counts
from octjepa.tasks.segment.evaluation import hd95_mm
from octjepa.tasks.segment.folder import load_head, save_head
from octjepa.tasks.segment.linear import PENALTIES, fit_linear_head
from octjepa.tasks.segment.network import Decoder
from octjepa.tasks.segment.recipe import DecoderRecipe, SegmentRecipe
from octjepa.tasks.segment.windows import (
    Cut,
    LabelledVolume,
    PositionPrior,
    corners,
    encode,
    encoder_tokens,
    refine_columns,
    window,
)
from octjepa.views.geometry import sample_transform
from octjepa.views.intensity import sample_augmentation
from synthetic import TEST_SIZE, small_recipe, volume

from .conftest import write_encoder

pytestmark = pytest.mark.timeout(400)
RECIPE = small_recipe(model=TEST_SIZE)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PretrainedEncoder:
    return load_encoder(write_encoder(tmp_path_factory.mktemp("decoder") / "encoder.safetensors", RECIPE))


def labelled(number: int) -> LabelledVolume:
    """The bright band of a synthetic volume, whose height depends on `number`; its last slice is not labelled."""
    made = volume(RECIPE.preprocessing, number)
    rows = np.arange(made.pixels.shape[1])[None, :, None]
    labels = ((rows >= made.band[0][:, None]) & (rows < made.band[1][:, None])).astype(np.uint8)
    labels[-1] = 255
    return made, labels


def volumes(split: str) -> Sequence[Callable[[], LabelledVolume]]:
    numbers = {"train": range(6), "val": range(6, 8), "test": range(8, 11)}[split]
    return [lambda number=number: labelled(number) for number in numbers]


PRIOR = PositionPrior.from_labels((read()[1] for read in volumes("train")), 2, 4)


@pytest.mark.slow
def test_trained_it_beats_the_prior_and_the_encoder_is_as_it_was(encoder: PretrainedEncoder) -> None:
    before = copy.deepcopy(encoder.encoder.state_dict())
    head, update, found = decoder.train(encoder, DecoderRecipe(updates=24, lr=1e-2), 0, PRIOR, volumes)
    assert update in (6, 12, 18, 24)
    assert found is not None
    counts = np.zeros((2, 1, 3))
    for read in volumes("test"):
        made, labels = read()
        for number, scores in enumerate((head.scores(made), PRIOR.scores(made.pixels.shape))):
            counts[number] += voxel_counts(scores.argmax(axis=0).astype(np.uint8), labels, 1)
    ours, prior = (float(dice(one[None])[0, 0]) for one in counts)
    assert ours > prior + 0.02
    assert ours > 0.93
    for name, value in encoder.encoder.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.slow
def test_a_training_that_was_stopped_goes_on_to_the_same_weights(
    encoder: PretrainedEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DecoderRecipe(width=4, updates=4, save_every=2)
    whole, update, found = decoder.train(encoder, settings, 0, PRIOR, volumes)
    honest, calls = decoder.masked_loss, iter(range(100))

    def stop(*given: object) -> torch.Tensor:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return honest(*given)

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "masked_loss", stop)
        with pytest.raises(KeyboardInterrupt):
            decoder.train(encoder, settings, 0, PRIOR, volumes, folder=tmp_path)
    again, *chosen = decoder.train(encoder, settings, 0, PRIOR, volumes, folder=tmp_path)
    assert chosen == [update, found]
    for name, value in whole.decoder.state_dict().items():
        assert torch.equal(value, again.decoder.state_dict()[name]), name


def test_a_few_labelled_eyes_say_less_of_a_position_than_of_a_depth() -> None:
    labels = np.zeros((2, 3, 4, 8), np.uint8)
    labels[0, 0, 1] = 1  # at one depth of one slice
    labels[1, :, 3] = 255
    shares = PositionPrior.from_labels(labels, 2, 4).shares
    at_depth = 1 / 6  # of the six slices
    assert shares[1, 0, 1] == pytest.approx((1 + 4 * at_depth) / 6)
    assert shares[1, 1, 1] == pytest.approx(4 * at_depth / 6)
    assert shares[0, 0, 3] == pytest.approx(1)
    assert np.allclose(shares.sum(axis=0), 1)
    nothing = PositionPrior.from_labels(np.full((1, 3, 4, 8), 255, np.uint8), 2, 4).shares
    assert np.allclose(nothing[0], 1)


@pytest.mark.parametrize("width", [32, 34])  # 34 is no multiple of the coarse columns
def test_the_prior_is_in_the_middle_of_scans_that_are_wider_than_the_stored_volumes(width: int) -> None:
    labels = np.zeros((1, 2, 8, width), np.uint8)
    labels[:, :, 3:5, width // 2 - 4 : width // 2 + 4] = 1
    prior = PositionPrior.from_labels(labels, 2, 4)
    stored = prior.scores((2, 8, width))
    for extra in range(1, 6):  # columns on each side
        wide = prior.scores((2, 8, width + 2 * extra))
        assert np.array_equal(wide, np.pad(stored, ((0, 0),) * 3 + ((extra, extra),), "edge"))


def test_before_the_first_update_it_says_the_prior(encoder: PretrainedEncoder) -> None:
    made, _ = labelled(0)
    blank = Decoder(encoder.dim, RECIPE.grid, 4, 2)
    head = decoder.DecoderHead(encoder.encoder, blank, PRIOR, RECIPE)
    assert np.array_equal(head.scores(made).argmax(axis=0), PRIOR.scores(made.pixels.shape).argmax(axis=0))


@pytest.mark.slow
def test_where_val_holds_no_class_nothing_is_chosen(encoder: PretrainedEncoder) -> None:
    def without(split: str) -> Sequence[Callable[[], LabelledVolume]]:
        def empty(read: Callable[[], LabelledVolume]) -> LabelledVolume:
            volume, labels = read()
            return volume, np.where(labels == 1, np.uint8(0), labels)

        return volumes(split) if split == "train" else [lambda read=read: empty(read) for read in volumes(split)]

    _, update, found = decoder.train(encoder, DecoderRecipe(updates=4), 0, PRIOR, without)
    assert (update, found) == (4, None)  # not the first look's, of which none is better
    read = {split: (one() for one in without(split)) for split in ("train", "val")}
    _, penalty, found = fit_linear_head(encoder_tokens(encoder), read["train"], read["val"], PRIOR, RECIPE)
    assert (penalty, found) == (PENALTIES[1], None)
    assert mean_dice(np.array([[2.0, 4, 4], [0, 0, 0]])) == 0.5  # the second class is neither there nor said
    assert mean_dice(np.array([[2.0, 4, 4], [0, 1, 0]])) == 0.5  # said, but not there: no other set of classes
    assert mean_dice(np.array([[0.0, 4, 0], [0, 0, 0]])) is None


@pytest.mark.slow
def test_tuning_changes_the_encoder_and_the_head_carries_it(encoder: PretrainedEncoder, tmp_path: Path) -> None:
    settings = DecoderRecipe(width=4, updates=2, batch=1, encoder_decay=0.5)
    before = copy.deepcopy(encoder.encoder.state_dict())
    head, _, _ = decoder.train(encoder, settings, 0, PRIOR, volumes)
    assert head.network is not encoder.encoder
    assert any(not torch.equal(value, before[name]) for name, value in head.network.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in encoder.encoder.state_dict().items())
    save_head(tmp_path, head, ("band",), SegmentRecipe(name="t", decoder=settings), encoder)
    loaded = load_head(tmp_path, None)  # needs no other weights
    made, _ = labelled(9)
    assert np.allclose(loaded.head.scores(made), head.scores(made), atol=1e-6)


def test_rates_fall_block_by_block(encoder: PretrainedEncoder) -> None:
    groups = decoder.layer_decay_groups(encoder.encoder, 1.0, 0.5)
    depth = len(encoder.encoder.blocks)
    assert [group["lr"] for group in groups] == pytest.approx(
        [0.5 ** (depth + 1 - level) for level in range(depth + 1)]
    )
    assert sum(len(group["params"]) for group in groups) == len(list(encoder.encoder.parameters()))
    norm = {id(parameter) for parameter in encoder.encoder.norm.parameters()}
    assert norm <= {id(parameter) for parameter in groups[-1]["params"]}


@pytest.mark.slow
def test_positions_without_a_label_give_no_loss_and_no_gradient() -> None:
    loss_of = decoder.dice_cross_entropy
    rng = np.random.default_rng(0)
    wanted = rng.integers(0, 2, (1, 2, 4, 4)).astype(np.uint8)
    wanted[:, 1] = 255
    logits = torch.randn(1, 2, 2, 4, 4, requires_grad=True)
    decoder.masked_loss(logits, wanted, loss_of).backward()
    assert logits.grad is not None
    assert float(logits.grad[:, :, 1].abs().max()) == 0
    assert float(logits.grad[:, :, 0].abs().max()) > 0
    right = torch.nn.functional.one_hot(torch.from_numpy(wanted % 2).long(), 2).movedim(-1, 1) * 40.0
    assert float(decoder.masked_loss(right.float(), wanted, loss_of)) < 0.01


@pytest.mark.filterwarnings("ignore:.*always_return_as_numpy:FutureWarning")
def test_loss_and_metrics_are_those_of_monai() -> None:
    """MONAI is not needed to segment; the values are the same."""
    from monai.losses import DiceCELoss
    from monai.metrics import DiceMetric, compute_hausdorff_distance

    rng = np.random.default_rng(1)
    message, true = (rng.integers(0, 3, (4, 8, 8)).astype(np.uint8) for _ in range(2))
    ours = dice(voxel_counts(message, true, 2)[None])[:, 0]
    hot = [torch.from_numpy(np.stack([one == code for code in range(3)])[None]).float() for one in (message, true)]
    assert ours == pytest.approx(DiceMetric(include_background=False)(*hot)[0].numpy())
    logits = torch.from_numpy(rng.normal(size=(2, 4, 4, 8, 8))).float().requires_grad_(True)
    labels = torch.from_numpy(rng.integers(0, 3, (2, 1, 4, 8, 8))).float()  # class 3 is nowhere
    peer = DiceCELoss(to_onehot_y=True, softmax=True, include_background=False)
    losses = [loss(logits, labels) for loss in (decoder.dice_cross_entropy, peer)]
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in losses]
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-5)
    assert torch.allclose(*gradients, atol=1e-7)
    spacing_mm = (0.3, 0.01, 0.05)
    for size in ((6, 20, 20), (1, 12, 30)):
        blobs = [(gaussian_filter(rng.normal(size=size), 1.5) > 0.02).astype(np.uint8) for _ in range(2)]
        hot = [torch.from_numpy(blob[None, None].astype(bool)) for blob in blobs]
        expected = compute_hausdorff_distance(*hot, include_background=True, percentile=95, spacing=list(spacing_mm))
        assert hd95_mm(blobs[0], blobs[1], 1, spacing_mm)[0] == pytest.approx(float(expected), rel=1e-5)
    box, moved = np.zeros((2, 6, 20, 20), np.uint8)
    box[2:4, 5:10, 5:15] = 1
    moved[2:4, 8:13, 5:15] = 1  # three rows of 0.01 mm
    assert hd95_mm(moved, box, 2, spacing_mm)[0] == pytest.approx(0.03)
    assert np.isnan(hd95_mm(moved, box, 2, spacing_mm)[1])  # class 2 is nowhere


def test_a_window_is_encoded_as_embedding_does_it_and_windows_cover_the_volume(encoder: PretrainedEncoder) -> None:
    made, _ = labelled(0)
    at = corners(made.pixels.shape, RECIPE)
    assert at == [(0, 4, 0), (0, 4, 8)]
    assert corners((20, 72, 200), RECIPE)[-1] == (12, 4, 136)
    starts = sorted({corner[2] for corner in corners((8, 72, 200), RECIPE)})
    assert max(np.diff(starts)) <= 32
    middle = RECIPE.preprocessing.margin
    seen = window(made, Cut.at(middle), RECIPE)
    found = encode(encoder.encoder, [seen])[0].detach().numpy()
    known = encoder.encode_volumes([made])[0]
    assert np.array_equal(seen.index, known.grid_index)
    assert np.allclose(found, known.features, atol=1e-5)
    all_tokens = encoder.recipe.model_copy(
        update={"tokens": encoder.recipe.tokens.model_copy(update={"select": "all", "budget": None})}
    )
    whole = PretrainedEncoder(encoder.encoder, all_tokens, "all")
    ours = encoder_tokens(whole)(made, middle)
    theirs = whole.encode_volumes([made])[0]
    assert np.array_equal(ours.index, theirs.grid_index)
    assert np.allclose(ours.features, theirs.features, atol=1e-5)


def test_labels_and_prior_follow_a_mirrored_window_and_its_light_is_the_tokens_too() -> None:
    made, labels = labelled(0)
    views = ViewRecipe(flip_slow=1.0, flip_fast=1.0, gain=0.3, gamma=0.3)
    rng = np.random.default_rng(0)
    cut = Cut(sample_transform(RECIPE.preprocessing, views, rng), sample_augmentation(views, rng))
    seen, plain = window(made, cut, RECIPE), window(made, Cut.at(cut.transform.corner), RECIPE)
    assert not np.allclose(seen.image[::-1, :, ::-1], plain.image)
    order = np.argsort(seen.image[::-1, :, ::-1].ravel(), kind="stable")
    assert (np.diff(plain.image.ravel()[order]) >= 0).all()  # gain and gamma keep the order of voxels
    assert np.array_equal(cut.of(labels, RECIPE)[::-1, :, ::-1], Cut.at(cut.transform.corner).of(labels, RECIPE))
    shares = PRIOR.scores(made.pixels.shape)
    assert np.array_equal(cut.of(shares, RECIPE)[1, ::-1, :, ::-1], Cut.at(cut.transform.corner).of(shares, RECIPE)[1])
    first = np.unravel_index(seen.index[0], RECIPE.grid)
    where = tuple(slice(n * p, (n + 1) * p) for n, p in zip(first, RECIPE.tokens.patch_size, strict=True))
    assert np.array_equal(seen.image[where].ravel(), seen.patches[0])


def test_a_decoder_refuses_views_that_labels_do_not_follow() -> None:
    with pytest.raises(ValueError, match="zoom: a decoder's windows are changed only by crop, flips, gain and gamma"):
        DecoderRecipe(views=ViewRecipe(zoom=0.1))


def test_coarse_columns_come_back_where_they_were() -> None:
    line = np.arange(16, dtype=np.float32)
    coarse = line[2::4]
    assert refine_columns(coarse[None, None, None], 4, 16)[0, 0, 0] == pytest.approx(np.clip(line, 2, 14))


def test_windows_of_different_counts_are_decoded_together_as_alone() -> None:
    torch.manual_seed(0)
    network = Decoder(4, (2, 2, 2), 4, 2)
    torch.nn.init.normal_(network.output.weight)
    features, index = [torch.randn(5, 4), torch.randn(3, 4)], [torch.arange(5), torch.tensor([1, 4, 7])]
    images = torch.randn(2, 1, 2, 8, 8)
    together = network(features, index, images)
    for number in range(2):
        alone = network(features[number : number + 1], index[number : number + 1], images[number : number + 1])
        assert torch.allclose(together[number], alone[0], atol=1e-5)
