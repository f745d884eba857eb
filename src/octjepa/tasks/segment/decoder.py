"""The head that reads tokens and voxels, and its training.

It corrects the position prior: the network's scores are added to the prior's logarithms, and are zero before the first
update. Trained with Dice plus cross-entropy, as MONAI has them. The encoder stays frozen, or learns at a rate
that falls block by block. The weights that are kept are those of highest mean Dice on validation volumes, measured four
times.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional

from octjepa import keys
from octjepa.distributed.adamw import adamw
from octjepa.distributed.runtime import Runtime
from octjepa.encoders import PretrainedEncoder
from octjepa.recipe import Recipe
from octjepa.tasks.labels.label_files import UNLABELLED
from octjepa.tasks.segment.dice import mean_dice, voxel_counts
from octjepa.tasks.segment.network import Decoder
from octjepa.tasks.segment.recipe import DecoderRecipe
from octjepa.tasks.segment.windows import (
    Cut,
    LabelledVolume,
    PositionPrior,
    corners,
    encode,
    window,
    window_slices,
)
from octjepa.train.learner import Learner, layer_decay_groups
from octjepa.train.supervised import LoopSettings, SupervisedTask, train_supervised
from octjepa.views.geometry import sample_transform
from octjepa.views.intensity import sample_augmentation
from octjepa.volume import CanonicalVolume

_VALIDATIONS = 4
_MIN_SHARE = 1e-3  # of the prior, so that every class can be predicted at every position
_SMOOTH = 1e-5  # of the Dice in the loss: a class that is nowhere has Dice 1
_CERTAIN = 20.0  # the logit given to background if nothing is labelled: no loss, no gradient
ReadVolume = Callable[[], LabelledVolume]
Loss = Callable[[Tensor, Tensor], Tensor]


class DecoderHead:
    """An encoder and the decoder above it. `blind` gives the decoder no token, to measure what the voxels allow."""

    def __init__(
        self, network: nn.Module, decoder: Decoder, prior: PositionPrior, recipe: Recipe, blind: bool = False
    ) -> None:
        self.network, self.decoder, self.prior, self.recipe, self.blind = network, decoder, prior, recipe, blind

    def logits(
        self, volumes: Sequence[CanonicalVolume], cuts: Sequence[Cut], learning: bool
    ) -> Float[Tensor, "b classes d h w"]:
        """Of a window of each volume."""
        device = self.decoder.missing.device
        windows = [window(volume, cut, self.recipe) for volume, cut in zip(volumes, cuts, strict=True)]
        shares = np.stack(
            [
                cut.of(self.prior.scores(volume.pixels.shape), self.recipe)
                for volume, cut in zip(volumes, cuts, strict=True)
            ]
        )
        with torch.set_grad_enabled(
            learning and any(parameter.requires_grad for parameter in self.network.parameters())
        ):
            features = [feature.float() for feature in encode(self.network, windows)]
        if self.blind:
            features = [torch.zeros_like(feature) for feature in features]
        index = [torch.from_numpy(window.index).to(device) for window in windows]
        image = torch.from_numpy(np.stack([window.image for window in windows])[:, None]).to(device)
        scores: Tensor = self.decoder(features, index, image)
        return scores + torch.from_numpy(np.log(shares + _MIN_SHARE).astype(np.float32)).to(device)

    @torch.no_grad()
    def scores(self, volume: CanonicalVolume) -> Float[np.ndarray, "classes D H W"]:
        """Probabilities, the mean where windows overlap; the prior if no window reaches."""
        shape, total = volume.pixels.shape, None
        self.decoder.eval()
        for corner in corners(shape, self.recipe):
            probabilities = self.logits([volume], [Cut.at(corner)], False)[0].softmax(dim=0).cpu().numpy()
            total = np.zeros((len(probabilities), *shape), np.float32) if total is None else total
            total[(slice(None), *window_slices(corner, self.recipe))] += probabilities
        assert total is not None
        weight = total.sum(axis=0)
        return np.where(weight > 0, total / np.maximum(weight, 1), self.prior.scores(shape)).astype(np.float32)


class DecoderTask(SupervisedTask[list[tuple[LabelledVolume, Cut]]]):
    """Training of a decoder head on random windows of the training volumes, changed as the recipe's `views` say."""

    def __init__(
        self,
        head: DecoderHead,
        decoder: DecoderRecipe,
        seed: int,
        train: Sequence[ReadVolume],
        val: Sequence[ReadVolume],
        groups: Sequence[dict[str, Any]],
    ) -> None:
        self.head, self.settings, self.seed, self.train, self.val = head, decoder, seed, train, val
        self.rates = [group["lr"] for group in groups]
        self.optimizer = adamw(groups, head.decoder.missing.device, weight_decay=0.01)
        self.loss = dice_cross_entropy

    def begin_update(self, update: int) -> dict[str, Any]:
        self.head.decoder.train()
        for group, peak in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = one_cycle(update, self.settings.updates + 1, peak)
        return {"lr": self.optimizer.param_groups[0]["lr"]}

    def batches(self, start: int) -> Iterator[list[tuple[LabelledVolume, Cut]]]:
        views, preprocessing = self.settings.views, self.head.recipe.preprocessing
        rng = keys.generator(self.seed, "segment batches")
        for update in count():
            chosen = rng.integers(len(self.train), size=self.settings.batch)
            cuts = [Cut(sample_transform(preprocessing, views, rng), sample_augmentation(views, rng)) for _ in chosen]
            if update >= start:  # what was drawn for earlier updates is not read again
                yield [(self.train[int(number)](), cut) for number, cut in zip(chosen, cuts, strict=True)]

    def losses(
        self, learner: Learner, batch: list[tuple[LabelledVolume, Cut]], update: int, micro_batch: int
    ) -> Iterator[Tensor]:
        for start in range(0, len(batch), micro_batch):
            part = batch[start : start + micro_batch]
            logits = self.head.logits([volume for (volume, _), _ in part], [cut for _, cut in part], True)
            labels = np.stack([cut.of(labels, self.head.recipe) for (_, labels), cut in part])
            yield masked_loss(logits, labels, self.loss) * (len(part) / len(batch))

    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        """Minus the mean Dice of the validation volumes."""
        dice = head_dice(self.head, self.val, len(self.head.prior.shares))
        return [None if dice is None else -dice]


def train(
    encoder: PretrainedEncoder,
    decoder_recipe: DecoderRecipe,
    seed: int,
    prior: PositionPrior,
    volumes: Callable[[str], Sequence[ReadVolume]],
    blind: bool = False,
    folder: Path | None = None,
    fingerprint: str = "",
) -> tuple[DecoderHead, int, float | None]:
    """(head, the update of its weights, its mean Dice on validation volumes or None where these hold no class).

    `volumes` gives the readers of a split's volumes. folder, fingerprint: as of `train_supervised`.
    """
    recipe, device, classes = encoder.recipe, next(encoder.encoder.parameters()).device, len(prior.shares)
    torch.manual_seed(seed)
    decoder = Decoder(encoder.dim, recipe.grid, decoder_recipe.width, classes).to(device)
    network = encoder.encoder
    trained = nn.ModuleDict({"decoder": decoder})
    groups: list[dict[str, Any]] = [{"params": list(decoder.parameters()), "lr": decoder_recipe.lr}]
    if decoder_recipe.encoder_decay is not None and not blind:
        network = copy.deepcopy(network).requires_grad_(True)
        trained["encoder"] = network
        groups += layer_decay_groups(network, decoder_recipe.lr, decoder_recipe.encoder_decay)
    head = DecoderHead(network, decoder, prior, recipe, blind)
    task = DecoderTask(head, decoder_recipe, seed, volumes("train"), volumes("val"), groups)
    updates = decoder_recipe.updates
    learner = Learner("decoder", trained, task.optimizer, updates)
    settings = LoopSettings(
        "segment",
        updates,
        decoder_recipe.batch,
        {math.ceil(updates * part / _VALIDATIONS) for part in range(1, _VALIDATIONS + 1)},
        clip_norm=1.0,
        save_every=decoder_recipe.save_every,
        rates="decoder.lr",
        resume="the same command",
    )
    train_supervised(task, [learner], settings, Runtime("fp32"), folder, fingerprint)
    best = learner.best_loss
    return head, learner.best_update or updates, None if best is None else -best


def one_cycle(update: int, total: int, peak: float) -> float:
    """The learning rate of `update` (from 0): torch's OneCycleLR with its defaults (Smith & Topin 2017)."""
    first, turn = peak / 25, 0.3 * total - 1
    if update <= turn:
        return _cosine(first, peak, update / turn)
    return _cosine(peak, first / 1e4, (update - turn) / (total - 1 - turn))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2.0 * (math.cos(math.pi * share) + 1)


def head_dice(head: DecoderHead, readers: Sequence[ReadVolume], classes: int) -> float | None:
    """Mean Dice over the classes, all volumes together; None where their labels hold none."""
    counts = np.zeros((classes - 1, 3))
    for read in readers:
        volume, labels = read()
        counts += voxel_counts(head.scores(volume).argmax(axis=0).astype(np.uint8), labels, classes - 1)
    return mean_dice(counts)


def dice_cross_entropy(logits: Float[Tensor, "b classes d h w"], true: Float[Tensor, "b 1 d h w"]) -> Tensor:
    """Cross-entropy plus the mean of 1 - Dice over volumes and classes, background left out (as MONAI's DiceCELoss)."""
    codes = true[:, 0].long()
    shares = torch.softmax(logits, dim=1)[:, 1:]
    marked = functional.one_hot(codes, logits.shape[1]).movedim(-1, 1)[:, 1:].to(shares.dtype)
    axes = tuple(range(2, shares.ndim))
    common, total = (shares * marked).sum(axes), shares.sum(axes) + marked.sum(axes)
    dice = (2 * common + _SMOOTH) / (total + _SMOOTH)
    return functional.cross_entropy(logits, codes) + (1 - dice).mean()


def masked_loss(logits: Float[Tensor, "b classes d h w"], labels: UInt8[np.ndarray, "b d h w"], loss: Loss) -> Tensor:
    """The loss where labels are; elsewhere the prediction counts as background with certainty."""
    true = torch.from_numpy(labels.astype(np.int64))[:, None].to(logits.device)
    is_labelled = true != UNLABELLED
    background = torch.zeros_like(logits)
    background[:, 0] = _CERTAIN
    return loss(torch.where(is_labelled, logits, background), torch.where(is_labelled, true, 0).float())
