"""The light decoder: tokens brought up to voxels in two steps, with a skip from the volume itself at both.

It corrects the place prior: its scores are added to the prior's logarithms, and are zero before the first update.
Trained with Dice plus cross-entropy of MONAI (extra `segment`). The encoder stays frozen, or learns at a rate that
falls block by block (`layer_rates`). Places without a token hold a learned vector. The state that is kept is the one of
highest mean Dice on validation volumes, looked at four times.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from octjepa import keys
from octjepa.checkpoint import PretrainedEncoder
from octjepa.errors import UsageError
from octjepa.extras import to_install
from octjepa.progress import bar
from octjepa.recipe import Recipe
from octjepa.store import CanonicalVolume
from octjepa.tasks.segment.counts import counted, mean_of_classes
from octjepa.tasks.segment.label_files import UNSEEN
from octjepa.tasks.segment.linear import Labelled
from octjepa.tasks.segment.prior import Prior
from octjepa.tasks.segment.recipe import DecoderSettings
from octjepa.tasks.segment.windows import Corner, corners, cut_labels, encode, window
from octjepa.train.learner import layer_decay_groups

_LOOKS = 4  # at the validation volumes
_LEAST_SHARE = 1e-3  # of the prior, so that what was never seen somewhere may be there
_SURE = 20.0  # the logit given to background where nothing is labelled: no loss, no gradient


class Decoder(nn.Module):
    """Tokens [b, grid, dim] and the z-scored window [b, 1, d, h, w] to scores of the classes, background first."""

    def __init__(self, dim: int, grid: tuple[int, int, int], width: int, classes: int) -> None:
        super().__init__()
        self.grid = grid
        self.missing = nn.Parameter(torch.zeros(dim))
        self.squeeze = nn.Conv3d(dim, 4 * width, 1)
        self.near = _block(1, width, (1, 3, 3))
        self.far = _block(width, 2 * width, (3, 3, 3))
        self.middle = _block(6 * width, 2 * width, (3, 3, 3))
        self.last = _block(3 * width, width, (1, 3, 3))
        self.say = nn.Conv3d(width, classes, 1)
        nn.init.zeros_(self.say.weight)
        nn.init.zeros_(self.say.bias)  # type: ignore[arg-type]

    def forward(
        self, features: Float[Tensor, "b k dim"], index: Tensor, image: Float[Tensor, "b 1 d h w"]
    ) -> Float[Tensor, "b classes d h w"]:
        whole = self.missing.expand(len(features), math.prod(self.grid), -1).scatter(
            1, index[..., None].expand(-1, -1, features.shape[-1]), features
        )
        coarse = self.squeeze(whole.transpose(1, 2).unflatten(2, self.grid))
        near = self.near(image)
        far = self.far(F.avg_pool3d(near, (1, 4, 4)))
        up = F.interpolate(coarse, far.shape[2:], mode="trilinear")
        middle = self.middle(torch.cat([up, far], dim=1))
        up = F.interpolate(middle, image.shape[2:], mode="trilinear")
        scores: Tensor = self.say(self.last(torch.cat([up, near], dim=1)))
        return scores


def _block(before: int, after: int, size: tuple[int, int, int]) -> nn.Sequential:
    padding = (size[0] // 2, size[1] // 2, size[2] // 2)
    return nn.Sequential(
        nn.Conv3d(before, after, size, padding=padding), nn.GroupNorm(math.gcd(4, after), after), nn.GELU()
    )


class DecoderHead:
    """An encoder and the decoder above it. `blind` gives the decoder no token: what the volume alone tells it."""

    def __init__(self, network: nn.Module, decoder: Decoder, prior: Prior, recipe: Recipe, blind: bool = False) -> None:
        self.network, self.decoder, self.prior, self.recipe, self.blind = network, decoder, prior, recipe, blind

    def logits(
        self, volumes: Sequence[CanonicalVolume], at: Sequence[Corner], learning: bool
    ) -> Float[Tensor, "b classes d h w"]:
        """Of a window of each volume."""
        device = self.decoder.missing.device
        windows = [window(volume, corner, self.recipe) for volume, corner in zip(volumes, at, strict=True)]
        size = self.recipe.preprocessing.image_size
        shares = np.stack([
            self.prior.scores(volume.pixels.shape)[(slice(None), *_box(corner, size))]
            for volume, corner in zip(volumes, at, strict=True)
        ])  # fmt: skip
        with torch.set_grad_enabled(learning and any(one.requires_grad for one in self.network.parameters())):
            features = encode(self.network, windows).float()
        if self.blind:
            features = torch.zeros_like(features)
        index = torch.from_numpy(np.stack([one.index for one in windows])).to(device)
        image = torch.from_numpy(np.stack([one.image for one in windows])[:, None]).to(device)
        found: Tensor = self.decoder(features, index, image)
        return found + torch.from_numpy(np.log(shares + _LEAST_SHARE).astype(np.float32)).to(device)

    @torch.no_grad()
    def scores(self, volume: CanonicalVolume) -> Float[np.ndarray, "classes D H W"]:
        """Probabilities, the mean where windows overlap; the prior where no window reaches."""
        shape, total = volume.pixels.shape, None
        self.decoder.eval()
        for corner in corners(shape, self.recipe):
            said = self.logits([volume], [corner], False)[0].softmax(dim=0).cpu().numpy()
            total = np.zeros((len(said), *shape), np.float32) if total is None else total
            total[(slice(None), *_box(corner, self.recipe.preprocessing.image_size))] += said
        assert total is not None
        weight = total.sum(axis=0)
        return np.where(weight > 0, total / np.maximum(weight, 1), self.prior.scores(shape)).astype(np.float32)


def _box(corner: Corner, size: tuple[int, int, int]) -> tuple[slice, slice, slice]:
    (a, b, c), (d, h, w) = corner, size
    return slice(a, a + d), slice(b, b + h), slice(c, c + w)


def losses() -> Callable[[Tensor, Tensor], Tensor]:
    """MONAI's Dice + cross-entropy. Raises UsageError naming the extra."""
    made: Callable[[Tensor, Tensor], Tensor] = monai("losses").DiceCELoss(
        to_onehot_y=True, softmax=True, include_background=False
    )
    return made


def monai(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"monai.{module}")
    except ImportError:
        raise UsageError(f"segmentation needs MONAI: {to_install('segment')}") from None


def train(
    encoder: PretrainedEncoder,
    settings: DecoderSettings,
    seed: int,
    prior: Prior,
    volumes: Callable[[str], Sequence[Callable[[], Labelled]]],
    blind: bool = False,
) -> tuple[DecoderHead, int, float | None]:
    """(head, the update it was kept at, its mean Dice on validation volumes or None where these hold no class).

    `volumes` gives the readers of a split's volumes.
    """
    loss_of, recipe, classes = losses(), encoder.recipe, len(prior.shares)
    device = next(encoder.encoder.parameters()).device
    torch.manual_seed(seed)
    decoder = Decoder(encoder.dim, recipe.grid, settings.width, classes).to(device)
    network = encoder.encoder
    tuned = settings.encoder_decay is not None and not blind
    if tuned:
        network = copy.deepcopy(network).requires_grad_(True)
    head = DecoderHead(network, decoder, prior, recipe, blind)
    groups: list[dict[str, Any]] = [{"params": list(decoder.parameters()), "lr": settings.lr}]
    if tuned:
        groups += layer_decay_groups(network, settings.lr, settings.encoder_decay or 1.0)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], total_steps=settings.updates + 1, cycle_momentum=False
    )
    readers, rng = volumes("train"), keys.generator(seed, "segment batches")
    look_at = {math.ceil(settings.updates * part / _LOOKS) for part in range(1, _LOOKS + 1)}
    kept: tuple[float, int, dict[str, Any], dict[str, Any]] | None = None
    with bar("segment", settings.updates, "update") as progress:
        for update in range(1, settings.updates + 1):
            chosen = [readers[int(place)]() for place in rng.integers(len(readers), size=settings.batch)]
            at = [corners(volume.pixels.shape, recipe) for volume, _ in chosen]
            corner = [one[int(rng.integers(len(one)))] for one in at]
            decoder.train()
            loss = _loss(head, chosen, corner, loss_of)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
            optimizer.step()
            schedule.step()
            progress.advance()
            if update in look_at:
                judged = mean_dice(head, volumes("val"), classes)
                if judged is not None and (kept is None or judged > kept[0]):
                    encoder_state = copy.deepcopy(network.state_dict()) if tuned else {}
                    kept = judged, update, copy.deepcopy(decoder.state_dict()), encoder_state
    if kept is None:
        return head, settings.updates, None
    decoder.load_state_dict(kept[2])
    if tuned:
        network.load_state_dict(kept[3])
    return head, kept[1], kept[0]


def mean_dice(head: DecoderHead, readers: Sequence[Callable[[], Labelled]], classes: int) -> float | None:
    """Over the classes, all volumes together; None where their labels hold none."""
    counts = np.zeros((classes - 1, 3))
    for read in readers:
        volume, labels = read()
        counts += counted(head.scores(volume).argmax(axis=0).astype(np.uint8), labels, classes - 1)
    return mean_of_classes(counts)


def _loss(
    head: DecoderHead, chosen: Sequence[Labelled], corner: Sequence[Corner], loss_of: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    logits = head.logits([volume for volume, _ in chosen], corner, True)
    wanted = np.stack([cut_labels(labels, at, head.recipe) for (_, labels), at in zip(chosen, corner, strict=True)])
    return masked_loss(logits, wanted, loss_of)


def masked_loss(
    logits: Float[Tensor, "b classes d h w"],
    wanted: UInt8[np.ndarray, "b d h w"],
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The loss where labels are; elsewhere the answer counts as background said with certainty."""
    true = torch.from_numpy(wanted.astype(np.int64))[:, None].to(logits.device)
    known = true != UNSEEN
    sure = torch.zeros_like(logits)
    sure[:, 0] = _SURE
    return loss_of(torch.where(known, logits, sure), torch.where(known, true, 0).float())
