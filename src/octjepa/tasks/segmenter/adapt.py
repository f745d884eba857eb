"""Adapt the packaged segmentation network to labelled B-scans, from one B-scan to many scans.

In: `LabelledScan`s, whose boundaries may be NaN and whose voxels may be unlabelled. Out: `Adaptation`: a `Segmenter`,
and a table of scores on B-scans that were held out: the packaged network, the adapted one, and the same network from
random weights with the same budget.

All weights are trained on augmented crops of the labelled B-scans. Held-out B-scans choose the step (early stopping),
step 0 included. Of one or two labelled B-scans none is held out; the last step is taken then. A voxel whose class is
partly known (fluid of either kind; not fluid, but perhaps sub-RPE material) is learned as the set of classes that it
may have: the loss is the negative logarithm of the sum of their probabilities.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional

from octjepa.distributed.adamw import adamw
from octjepa.distributed.precision import AUTO, choose_precision
from octjepa.distributed.runtime import Runtime
from octjepa.errors import OctjepaError, UsageError
from octjepa.keys import key
from octjepa.layers import BOUNDARIES, CLASSES
from octjepa.model.boundary_unet import STRIDE, BoundaryUNet, NetworkSize, boundary_loss, decode_boundaries
from octjepa.model.bscan_inference import Calibration, bscan_logits, near_bscans, resampled, with_statistics
from octjepa.record import Record
from octjepa.tasks.labels.layer_names import ANY_CLASS, FLUID, SUB_RPE
from octjepa.tasks.segmenter.image_formation import ROW_UM, SIZE, Draws
from octjepa.tasks.segmenter.inference import Segmenter, load_segmenter, network_shape, without_fill
from octjepa.train.learner import Learner
from octjepa.train.optimizer import set_learning_rate
from octjepa.train.supervised import LoopSettings, SupervisedTask, train_supervised
from octjepa.volume import OCTVolume

_FEWEST: Final = 3  # labelled B-scans (or people) from which some are held out
_HELD_OUT: Final = 0.2
_NEIGHBOURS: Final = 0.5  # share of training samples that show the neighbouring B-scans
_STATISTICS_BSCANS: Final = 8  # of a scan that give the statistics for the score of held-out B-scans
_CLIP_NORM: Final = 1.0
_LEAST_COLUMNS: Final = 16  # labelled columns without which a B-scan teaches nothing


@dataclass(frozen=True, eq=False)
class LabelledScan:
    """A scan with labels in its own voxels.

    `boundaries_px` holds fractional rows in the order of `BOUNDARIES`, NaN where unknown. `allowed` has bit k set where
    the voxel may be of class k of `CLASSES`; `ANY_CLASS` is "not labelled".
    """

    name: str
    volume: OCTVolume
    boundaries_px: Float[np.ndarray, "8 D W"]
    allowed: UInt8[np.ndarray, "D H W"]

    @property
    def bscans(self) -> tuple[int, ...]:
        """Indices of B-scans with labels."""
        columns = np.isfinite(self.boundaries_px).any(0) | (self.allowed != ANY_CLASS).any(1)
        return tuple(int(k) for k in np.flatnonzero(columns.sum(1) >= _LEAST_COLUMNS))


@dataclass(frozen=True)
class AdaptSettings:
    """Settings of an adaptation. Few B-scans get fewer steps, because the network soon knows them by heart."""

    cpu_seconds: float = 115.0
    most_steps: int = 110
    first_steps: int = 30
    steps_per_bscan: int = 10
    batch: int = 4
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    validate_every: int = 10
    adapted_share: float = 0.5  # share of the learned weights in the result
    statistics_share: float = 0.5  # of the scan's own statistics in held-out B-scans; as in the calibration
    seed: int = 1

    def steps(self, bscans: int) -> int:
        """Steps for a number of training B-scans."""
        return min(self.most_steps, self.first_steps + self.steps_per_bscan * bscans)


@dataclass(frozen=True)
class AdaptScore(Record):
    """Scores on held-out B-scans: um per boundary (nan if not labelled), Dice of fluid (nan if none is labelled)."""

    boundary_um: tuple[float, ...]
    mean_um: float
    dice: float


@dataclass(frozen=True)
class Candidate(Record):
    """A row of the table. `score` is None if no B-scan was held out; `step` is the one that was chosen."""

    name: str
    score: AdaptScore | None
    step: int
    steps: int
    cpu_seconds: float


@dataclass(frozen=True, eq=False)
class Adaptation:
    """The adapted network and the table next to it."""

    segmenter: Segmenter
    candidates: tuple[Candidate, ...]
    training_bscans: int
    held_out_bscans: int
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Sample:
    """A labelled B-scan between its neighbours at the network's spacing, grey values 0..255; zero for no neighbour.

    `group` is the person, and `scan` the scan, if they are known.
    """

    images: Float[Tensor, "3 H W"]
    present: tuple[bool, bool, bool]
    boundaries: Float[Tensor, "8 W"]
    allowed: Int[Tensor, "H W"]
    group: str = ""
    scan: str = ""


@dataclass(eq=False)
class Trained:
    """A network after training, at its best validation or else its last step."""

    network: nn.Module
    step: int
    steps: int
    cpu_seconds: float
    losses: list[float] = field(default_factory=list)


def adapt(
    scans: Sequence[LabelledScan],
    settings: AdaptSettings | None = None,
    start: Segmenter | None = None,
    baseline: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Adaptation:
    """Adapts `start` (the packaged network by default) to the labelled B-scans of `scans`.

    `baseline` also trains the network from random weights, with the same budget, for the table. `say` is told the
    progress. Raises UsageError: no labelled B-scan. Raises OctjepaError as `Segmenter.predict` does.
    """
    start = start or load_segmenter()
    settings = replace(settings or AdaptSettings(), statistics_share=start.calibration.adapt)
    samples = [sample for scan in scans for sample in labelled_samples(scan)]
    if not samples:
        raise UsageError("no B-scan has labels: expected boundaries or classes in at least 16 columns of one B-scan")
    training, held_out = split_samples(samples)
    notes = _label_notes(training, held_out)
    learned_fluid = _has_fluid_labels(training)
    trained = train(start.network, training, held_out, settings, lambda text: say(f"adapt: {text}"))
    adapted = Segmenter(trained.network, adapted_calibration(start.calibration, learned_fluid and trained.step > 0))
    candidates = [
        Candidate("packaged", _score(start, held_out, training), 0, 0, 0.0),
        Candidate("adapted", _score(adapted, held_out, training), trained.step, trained.steps, trained.cpu_seconds),
    ]
    if baseline and held_out:
        torch.manual_seed(settings.seed)
        random = train(
            BoundaryUNet(NetworkSize()),
            training,
            held_out,
            replace(settings, adapted_share=1.0),
            lambda text: say(f"random weights: {text}"),
        )
        calibrated = Segmenter(random.network, adapted_calibration(start.calibration, learned_fluid))
        score = _score(calibrated, held_out, training)
        candidates.append(Candidate("random weights", score, random.step, random.steps, random.cpu_seconds))
    return Adaptation(adapted, tuple(candidates), len(training), len(held_out), tuple(notes))


def labelled_samples(scan: LabelledScan) -> list[Sample]:
    """The labelled B-scans of `scan` as the network sees them. Raises OctjepaError: shapes that do not fit."""
    volume = scan.volume
    slices, height, width = volume.shape
    if scan.boundaries_px.shape != (8, slices, width) or scan.allowed.shape != volume.shape:
        raise OctjepaError(
            f"boundaries {scan.boundaries_px.shape} and classes {scan.allowed.shape} do not fit a scan of "
            f"{slices} x {height} x {width}: expected {(8, slices, width)} and {volume.shape}"
        )
    alone = volume.pattern in ("radial", "circle") or "slice" in volume.uncertain
    near = near_bscans(slices, volume.spacing_mm[0], volume.slice_positions_mm, alone)
    shape = network_shape((height, width), volume.spacing_mm)
    group = volume.person_id or scan.name
    samples = []
    for k in scan.bscans:
        images = torch.zeros(3, *shape)
        for slot, index in enumerate(near[k]):
            if index >= 0:
                pixels = torch.from_numpy(without_fill(volume.pixels[index].astype(np.float32)))
                images[slot] = resampled(pixels[None, None], shape)[0, 0]
        before, _, after = (bool(index >= 0) for index in near[k])
        boundaries = _boundaries_at(scan.boundaries_px[:, k], (height, width), shape)
        allowed = _allowed_at(scan.allowed[k], shape)
        samples.append(Sample(images, (before, True, after), boundaries, allowed, group, scan.name))
    return samples


def _boundaries_at(
    rows_px: Float[np.ndarray, "8 W"], native: tuple[int, int], shape: tuple[int, int]
) -> Float[Tensor, "8 w"]:
    """Boundaries on the network's grid; the nearest column, so that a column without a label stays without."""
    column = ((np.arange(shape[1]) + 0.5) * native[1] / shape[1]).astype(int).clip(0, native[1] - 1)
    rows = (rows_px[:, column] + 0.5) * shape[0] / native[0] - 0.5
    return torch.from_numpy(rows.astype(np.float32))


def _allowed_at(allowed: UInt8[np.ndarray, "H W"], shape: tuple[int, int]) -> Int[Tensor, "h w"]:
    """Sets of classes on the network's grid: the one that covers most of the voxel."""
    kinds = np.unique(allowed)
    if len(kinds) == 1:
        return torch.full(shape, int(kinds[0]))
    shares = torch.stack(
        [resampled(torch.from_numpy(allowed == kind)[None, None].float(), shape)[0, 0] for kind in kinds]
    )
    return torch.from_numpy(kinds.astype(np.int64))[shares.argmax(0)]


def split_samples(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """(training, held out): a fifth of the people if there are three or more, else a fifth of the B-scans.

    Of fewer than three B-scans none is held out.
    """
    groups = list(dict.fromkeys(sample.group for sample in samples))
    by_group = len(groups) >= _FEWEST
    count = len(groups) if by_group else len(samples)
    if count < _FEWEST:
        return list(samples), []
    held = max(1, round(_HELD_OUT * count))
    chosen = {int((k + 0.5) * count / held) for k in range(held)}  # evenly spread
    flags = [(groups.index(sample.group) if by_group else k) in chosen for k, sample in enumerate(samples)]
    pairs = list(zip(samples, flags, strict=True))
    return [sample for sample, flag in pairs if not flag], [sample for sample, flag in pairs if flag]


def _has_fluid_labels(samples: Sequence[Sample]) -> bool:
    return any(((sample.allowed & FLUID) == 0).any() or ((sample.allowed & ~FLUID) == 0).any() for sample in samples)


def _label_notes(training: Sequence[Sample], held_out: Sequence[Sample]) -> list[str]:
    notes = []
    is_known = torch.stack([torch.isfinite(sample.boundaries).any(1) for sample in training]).any(0)
    if missing := [name for name, there in zip(BOUNDARIES, is_known.tolist(), strict=True) if not there]:
        notes.append(f"no label of {', '.join(missing)}: these boundaries may get worse")
    if not _has_fluid_labels(training):
        notes.append("no label of fluid: its threshold stays that of the packaged network")
    if not held_out:
        notes.append("fewer than three labelled B-scans: none is held out, so nothing says how good the result is")
    return notes


def adapted_calibration(calibration: Calibration, learned_fluid: bool) -> Calibration:
    """Fluid that was learned from labels is marked from a probability of 0.5; the rest stays as calibrated."""
    return replace(calibration, fluid_threshold=0.5, class_temperature=1.0) if learned_fluid else calibration


@dataclass(frozen=True, eq=False)
class _Crops:
    """The crops of a step."""

    images: Float[Tensor, "N 3 H W"]
    boundaries: Float[Tensor, "N 8 W"]
    allowed: Int[Tensor, "N H W"]


class AdaptTask(SupervisedTask[_Crops]):
    """Crops of the labelled B-scans. The learning rate follows the steps, or the CPU time if that is used up sooner."""

    def __init__(
        self,
        learner: Learner,
        parts: tuple[Sequence[Sample], Sequence[Sample]],
        settings: AdaptSettings,
        runtime: Runtime,
        say: Callable[[str], None],
    ) -> None:
        self.learner, self.settings, self.runtime, self.say = learner, settings, runtime, say
        self.training, held_out = parts
        self.held_out = HeldOut.of(held_out, self.training) if held_out else None
        self.validations = {*range(settings.validate_every, learner.updates, settings.validate_every), learner.updates}
        self.losses_held_out: list[float] = []
        self.began = time.process_time()

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the training so far."""
        return time.process_time() - self.began

    def batches(self, start: int) -> Iterator[_Crops]:
        for step in count(start):
            rng = np.random.default_rng([self.settings.seed, step])
            draws = Draws(key("segmenter adaptation", self.settings.seed, step) % 2**31, torch.device("cpu"))
            yield _Crops(*draw_crops(self.training, rng, draws, self.settings.batch))

    def begin_update(self, update: int) -> dict[str, Any]:
        self.say(f"step {update + 1} of {self.learner.updates}")
        used = self.cpu_seconds / self.settings.cpu_seconds
        if used >= 1 and update + 1 < self.learner.updates:
            # No CPU time is left: this step is the last one, and it is validated.
            self.learner.updates = update + 1
            self.validations.add(update + 1)
        planned = self.settings.steps(len(self.training))
        # On a machine that is fast enough the rate depends only on the step, so a seed always gives the same weights.
        share = used if used > (update + 1) / planned else update / planned
        set_learning_rate(self.learner.optimizer, self.settings.learning_rate * _schedule(share))
        self.learner.network.train()
        return {}

    def losses(self, learner: Learner, batch: _Crops, update: int, micro_batch: int) -> Iterator[Tensor]:
        total = len(batch.images)
        for start in range(0, total, micro_batch):
            part = slice(start, start + micro_batch)
            with self.runtime.autocast():
                logits = learner.network(batch.images[part].contiguous(memory_format=torch.channels_last))
            loss = _loss(logits, batch.boundaries[part], batch.allowed[part])
            yield loss * (len(logits) / total)

    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        if self.held_out is None:
            return [None] * len(learners)
        losses = [self.held_out.loss(learner.network, self.settings.statistics_share) for learner in learners]
        self.losses_held_out += losses
        return list(losses)


def train(
    network: nn.Module,
    training: Sequence[Sample],
    held_out: Sequence[Sample],
    settings: AdaptSettings,
    say: Callable[[str], None] = lambda text: None,
) -> Trained:
    """Trains a copy of `network` with the supervised loop of the training engine.

    Raises OctjepaError: too many steps in a row had a gradient that is not finite.
    """
    torch.manual_seed(settings.seed)
    device = torch.device("cpu")  # as in prediction
    runtime = Runtime(choose_precision(AUTO, device)[0])
    runtime.device = device
    copied = copy.deepcopy(network).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = adamw(
        copied.parameters(), runtime.device, lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    learner = Learner("adaptation", copied, optimizer, settings.steps(len(training)))
    task = AdaptTask(learner, (training, held_out), settings, runtime, say)
    (loss,) = task.validate([learner])
    if loss is not None:
        learner.follow_validation(0, loss)  # the packaged network may be the best one
    loop = LoopSettings(None, learner.updates, settings.batch, task.validations, _CLIP_NORM)
    train_supervised(task, [learner], loop, runtime)
    step = learner.best_update if held_out else learner.update
    if step:
        blend(copied, network, settings.adapted_share)
    return Trained(copied.eval(), step, learner.update, task.cpu_seconds, task.losses_held_out)


def blend(network: nn.Module, start: nn.Module, share: float) -> None:
    """Moves the weights of `network` to `share` of their way from those of `start`.

    The mean of a tuned network and the one it began with loses less on other data than the tuned network (Wortsman et
    al. 2022, "Robust fine-tuning of zero-shot models").
    """
    if share < 1:
        with torch.no_grad():
            for value, before in zip(network.state_dict().values(), start.state_dict().values(), strict=True):
                if value.is_floating_point():
                    value.lerp_(before, 1 - share)


def _schedule(share: float) -> float:
    """Warm-up over 5 %, then half a cosine down to 1 %."""
    return min(1.0, (share + 0.01) / 0.05) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))


def _loss(
    logits: Float[Tensor, "N O H W"], boundaries: Float[Tensor, "N 8 W"], allowed: Int[Tensor, "N H W"]
) -> Float[Tensor, ""]:
    """The losses of training on phantoms, for labels that are partly known."""
    return boundary_loss(logits[:, :8], boundaries) + 2 * allowed_loss(logits[:, 8:], allowed)


def allowed_loss(logits: Float[Tensor, "N 4 H W"], allowed: Int[Tensor, "N H W"]) -> Float[Tensor, ""]:
    """Minus the logarithm of the probability of the allowed classes, plus soft Dice of fluid and of sub-RPE."""
    log_p = functional.log_softmax(logits.float(), dim=1)
    bits = torch.tensor([1 << k for k in range(len(CLASSES))]).view(1, -1, 1, 1)
    possible = (allowed[:, None] & bits) > 0
    labelled = (allowed != ANY_CLASS).float()
    log_allowed = torch.where(possible, log_p, torch.full_like(log_p, -math.inf)).logsumexp(1)
    loss = -(log_allowed * labelled).sum() / labelled.sum().clamp(min=1)
    p = log_p.exp()
    for members in (FLUID, SUB_RPE):
        inside, outside = (allowed & ~members) == 0, (allowed & members) == 0
        is_known = (inside | outside).float()
        truth = inside.float()
        predicted = sum(p[:, k] for k in range(len(CLASSES)) if members >> k & 1) * is_known
        overlap, total = (predicted * truth).sum(), predicted.sum() + truth.sum()
        loss = loss + 0.25 * (1 - (2 * overlap + 1) / (total + 1))
    return loss


def draw_crops(
    samples: Sequence[Sample], rng: np.random.Generator, draws: Draws, count: int
) -> tuple[Float[Tensor, "N 3 H W"], Float[Tensor, "N 8 W"], Int[Tensor, "N H W"]]:
    """Random training crops: zoomed, sheared, mirrored, moved, with another display and noise; standardised each."""
    images, boundaries, allowed = [], [], []
    for index in rng.integers(len(samples), size=count):
        image, rows, classes = _crop(samples[index], rng)
        shown = (
            torch.tensor(samples[index].present) if rng.random() < _NEIGHBOURS else torch.tensor([False, True, False])
        )
        gamma, gain = math.exp(rng.normal(0, 0.25)), math.exp(rng.normal(0, 0.15))
        image = (image / 255).clamp(0, 1) ** gamma * gain + rng.uniform(0, 0.06) * draws.normal(3, SIZE, SIZE)
        deviation, mean = torch.std_mean(image, (1, 2), keepdim=True)
        images.append((image - mean) / (deviation + 1e-3) * shown.view(3, 1, 1))
        boundaries.append(rows)
        allowed.append(classes)
    return torch.stack(images), torch.stack(boundaries), torch.stack(allowed)


def _crop(sample: Sample, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A crop of `SIZE` rows and columns with its labels; beyond the B-scan nothing is labelled."""
    _, height, width = sample.images.shape
    zoom_y, zoom_x = math.exp(rng.uniform(-0.15, 0.2)), math.exp(rng.uniform(-0.2, 0.25))
    flip = 1.0 if rng.random() < 0.5 else -1.0
    shear = rng.normal(0, 0.04)  # rows per column
    slack = max(width - SIZE / zoom_x, 24.0)
    centre_x = (width - 1) / 2 + rng.uniform(-0.5, 0.5) * slack
    middle = sample.boundaries.nanmean() if torch.isfinite(sample.boundaries).any() else torch.tensor(height / 2)
    # The retina stays in the crop, also where a B-scan is much deeper than the crop.
    centre_y = float(middle) + rng.uniform(-0.2, 0.2) * SIZE / zoom_y
    step = torch.arange(SIZE, dtype=torch.float32) - (SIZE - 1) / 2
    x = centre_x + flip * step / zoom_x  # [SIZE], columns of the B-scan
    tilt = shear * step
    y = centre_y + tilt[None] + step[:, None] / zoom_y  # [SIZE, SIZE], rows of the B-scan
    grid = torch.stack([(2 * x / (width - 1) - 1).expand(SIZE, -1), 2 * y / (height - 1) - 1], -1)
    image = functional.grid_sample(sample.images[None], grid[None], padding_mode="border", align_corners=True)[0]
    inside = (x >= 0) & (x <= width - 1)
    column, row = x.round().long().clamp(0, width - 1), y.round().long()
    rows = (sample.boundaries[:, column] - centre_y - tilt) * zoom_y + (SIZE - 1) / 2
    seen = inside & (row >= 0) & (row < height)
    classes = sample.allowed[row.clamp(0, height - 1), column.expand(SIZE, -1)]
    return (
        image,
        torch.where(inside, rows, torch.full_like(rows, torch.nan)),
        torch.where(seen, classes, torch.full_like(classes, ANY_CLASS)),
    )


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out B-scans, and for each scan the B-scans whose statistics its batch normalisation uses.

    `Segmenter.predict` mixes the statistics of a scan into batch normalisation. Held-out B-scans are scored in the same
    way, with the statistics of all labelled B-scans of their scan. Statistics need no labels.
    """

    samples: dict[str, list[Sample]]
    statistics: dict[str, Float[Tensor, "N 3 H W"]]

    @classmethod
    def of(cls, held_out: Sequence[Sample], training: Sequence[Sample]) -> HeldOut:
        """The held-out B-scans by scan. `training` adds B-scans for the statistics of the same scans."""
        samples: dict[str, list[Sample]] = {}
        for sample in held_out:
            samples.setdefault(sample.scan, []).append(sample)
        statistics = {}
        for scan in samples:
            labelled = [sample for sample in (*held_out, *training) if sample.scan == scan]
            chosen = np.unique(np.linspace(0, len(labelled) - 1, _STATISTICS_BSCANS).astype(int))
            statistics[scan] = torch.cat([_prepared(labelled[k]) for k in chosen])
        return cls(samples, statistics)

    def logits(self, network: nn.Module, share: float, flip: bool) -> Iterator[tuple[Sample, Float[Tensor, "1 O H W"]]]:
        """Logits of every held-out B-scan, with a `share` of the statistics of its scan."""
        network.eval()
        for scan, samples in self.samples.items():
            with torch.inference_mode(), with_statistics(network, [self.statistics[scan]], share) as adapted:
                for sample in samples:
                    _, height, width = sample.images.shape
                    yield sample, bscan_logits(adapted, _prepared(sample), flip)[:, :, :height, :width]

    def loss(self, network: nn.Module, share: float) -> float:
        """Mean loss of whole B-scans without augmentation."""
        losses = [
            float(_loss(logits, sample.boundaries[None], sample.allowed[None]))
            for sample, logits in self.logits(network, share, flip=False)
        ]
        return sum(losses) / len(losses)

    def score(self, segmenter: Segmenter) -> AdaptScore:
        """Errors on the network's grid."""
        calibration = segmenter.calibration
        errors, hit, marked, true = [], 0, 0, 0
        for sample, logits in self.logits(segmenter.network, calibration.adapt, calibration.flip):
            errors.append((decode_boundaries(logits[:, :8]).rows[0] - sample.boundaries).abs() * ROW_UM)
            p = torch.softmax(logits[0, 8:] / calibration.class_temperature, 0)
            inside, outside = (sample.allowed & ~FLUID) == 0, (sample.allowed & FLUID) == 0
            fluid = (p[1] + p[2] >= calibration.fluid_threshold) & (inside | outside)
            hit += int((fluid & inside).sum())
            marked += int(fluid.sum())
            true += int(inside.sum())
        um = torch.cat(errors, 1).nanmean(1)
        is_graded = any(_has_fluid_labels(samples) for samples in self.samples.values())
        dice = 2 * hit / (marked + true) if marked + true and is_graded else math.nan
        return AdaptScore(tuple(round(float(v), 2) for v in um), round(float(um.nanmean()), 2), round(dice, 4))


def _prepared(sample: Sample) -> Float[Tensor, "1 3 H W"]:
    """A whole B-scan between its neighbours, prepared as `Segmenter.predict` does."""
    _, height, width = sample.images.shape
    deviation, mean = torch.std_mean(sample.images, (1, 2), keepdim=True)
    images = (sample.images - mean) / (deviation + 0.25)
    pad = (0, -width % STRIDE, 0, -height % STRIDE)
    return functional.pad(images[None], pad, mode="replicate") * torch.tensor(sample.present).view(1, 3, 1, 1)


def _score(segmenter: Segmenter, held_out: Sequence[Sample], training: Sequence[Sample]) -> AdaptScore | None:
    """The score on held-out B-scans; None without any."""
    return HeldOut.of(held_out, training).score(segmenter) if held_out else None


def as_record(adaptation: Adaptation, settings: AdaptSettings) -> dict[str, object]:
    """For `segmenter.json`: what was done, without names of scans."""
    return {
        "settings": asdict(settings),
        "training_bscans": adaptation.training_bscans,
        "held_out_bscans": adaptation.held_out_bscans,
        "candidates": [asdict(candidate) for candidate in adaptation.candidates],
        "notes": list(adaptation.notes),
    }
