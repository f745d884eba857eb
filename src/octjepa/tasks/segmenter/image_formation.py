"""From phantom scenes to training images: geometry, optics, speckle, display and normalisation, on any device.

In: the power of phantom B-scans and their neighbours (`octjepa.phantom.random_scene`), boundaries and classes. Out: a
`Batch` of normalised images with the truth moved alike. Everything is random per sample and done in torch where the
training runs, so that a pool of scenes gives new images at every step and a GPU does not wait for simulated speckle.

Speckle of L looks has a gamma law of shape L (Goodman). The third root of a gamma variable is nearly normal (Wilson and
Hilferty 1931), so one correlated Gaussian field gives speckle of any number of looks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional

from octjepa.phantom.dialect import DIALECTS
from octjepa.phantom.random_scene import LOWEST_DB, ROW_MM, STEPS_PER_DB

SIZE: Final = 256  # rows and columns of a training image
_KERNEL: Final = 9
_SHADOWS: Final = 6
ROW_UM: Final = ROW_MM * 1000


@dataclass(frozen=True, eq=False)
class Batch:
    """Normalised images, zero where a neighbour is missing; boundaries in rows, classes, and 1 for graded columns."""

    images: Float[Tensor, "N S H W"]
    boundaries: Float[Tensor, "N 8 W"]
    classes: Int[Tensor, "N H W"]
    graded: Float[Tensor, "N W"]


@dataclass(frozen=True, eq=False)
class Scenes:
    """Samples of a pool: power of each B-scan and its neighbours, the truth of the middle one, and the optics level."""

    power: UInt8[Tensor, "N S H W"]
    boundaries: Float[Tensor, "N 8 W"]
    classes: UInt8[Tensor, "N H W"]
    optics: Int[Tensor, " N"]
    present: Bool[Tensor, "N S"]  # where a neighbour is shown; on the CPU, so that no step waits for the device
    formed: Bool[Tensor, "N S"]  # what is computed; its count is the same in every step, so GPU shapes stay constant


class Draws:
    """Uniform and normal random numbers on a device, from one seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Values in [low, high)."""
        return torch.rand(*shape, device=self.device, generator=self.generator) * (high - low) + low

    def normal(self, *shape: int) -> Tensor:
        """Standard normal values."""
        return torch.randn(*shape, device=self.device, generator=self.generator)

    def chance(self, *shape: int, share: float) -> Tensor:
        """1.0 with probability `share`, else 0.0."""
        return (self.uniform(*shape) < share).float()


@dataclass(frozen=True, eq=False)
class _Optics:
    """Properties of an instrument, one value per sample."""

    looks: Tensor
    exponent: Tensor  # of the display: 0.25 is a fourth root, near 0 a logarithm
    floor: Tensor  # display value of the noise floor, 0..1
    bright: Tensor  # display value 20 dB above it
    axial: Tensor  # standard deviations in pixels: resolution, then grain of the speckle
    lateral: Tensor
    grain_axial: Tensor
    grain_lateral: Tensor


def form_batch(scenes: Scenes, draws: Draws, augment: bool = True) -> Batch:
    """Images of `scenes` and the truth in the same geometry.

    `augment` False keeps the geometry fixed (the middle of the scene, no zoom, no missing neighbour), for validation.
    """
    power, boundaries, classes, shown = _move(scenes, draws, augment)
    where = torch.nonzero(scenes.formed, as_tuple=True)
    sample, slot = (index.to(power.device) for index in where)
    there = scenes.present[where].float().to(power.device)
    display = _form(power[sample, slot], sample, boundaries, scenes.optics, draws)
    if augment:
        display = _fill_borders(display, sample, len(power), draws)
    # Beyond the scene there is a dark border, or the last column continues.
    dark = draws.chance(len(power), 1, share=0.5)
    display = display * torch.maximum(shown, 1 - dark)[sample][:, None]
    mean = display.mean((1, 2), keepdim=True)
    deviation = display.std((1, 2), keepdim=True)
    images = torch.zeros(*power.shape, device=power.device)
    normal = (display - mean) / (deviation + 1e-3) * there.view(-1, 1, 1)
    images[sample, slot] = torch.nan_to_num(normal)
    # Inside the optic disc nothing is graded.
    graded = shown * torch.isfinite(boundaries[:, 7]).float()
    return Batch(images, boundaries, classes, graded)


def _move(scenes: Scenes, draws: Draws, augment: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Zoom, shear, flip and crop: power (dB), boundaries and classes on the grid of the training image."""
    n, _, rows, columns = scenes.power.shape
    device = scenes.power.device
    strong = (scenes.optics == 2).float()
    zero = torch.zeros(n, device=device)
    zoom_y, zoom_x, flip, shear = zero + 1, zero + 1, zero + 1, zero
    if augment:
        zoom_y = torch.exp(draws.normal(n) * (0.05 + 0.10 * strong))
        zoom_x = torch.exp(draws.normal(n) * (0.06 + 0.16 * strong))
        flip = 1 - 2 * draws.chance(n, share=0.5)
        shear = draws.normal(n) * (0.03 + 0.09 * strong)  # rows per column
    step = torch.arange(SIZE, device=device, dtype=torch.float32) - (SIZE - 1) / 2
    middle = zero + (columns - 1) / 2
    if augment:
        slack = (columns - SIZE / zoom_x).clamp(min=24.0)  # a window may reach past the scene: a dark border
        middle = middle + (draws.uniform(n) - 0.5) * slack
    x = middle[:, None] + flip[:, None] * step / zoom_x[:, None]  # [N, W]
    shown = ((x >= 0) & (x <= columns - 1)).float()
    low = x.clamp(0, columns - 1).floor().long().clamp(max=columns - 2)
    share = (x.clamp(0, columns - 1) - low)[:, None]
    index = low[:, None].expand(-1, 8, -1)
    found = scenes.boundaries.gather(2, index) * (1 - share) + scenes.boundaries.gather(2, index + 1) * share
    tilt = shear[:, None] * step
    relative = found - tilt[:, None]
    inside = torch.isfinite(relative) & (shown[:, None] > 0)
    top = torch.where(inside, relative, torch.full_like(relative, 1e4)).amin((1, 2))
    bottom = torch.where(inside, relative, torch.full_like(relative, -1e4)).amax((1, 2))
    height = (bottom - top) * zoom_y
    spare = SIZE - 12 - height
    at = torch.where(spare > 0, 6 + spare * (draws.uniform(n) if augment else 0.4), 6 + spare / 2)
    if augment:  # a few retinas are cut off at the upper or lower edge
        at = at + draws.chance(n, share=0.06) * draws.normal(n) * 80
    offset = (top - at / zoom_y)[:, None] + tilt  # row of the scene at the top of each column
    boundaries = (found - offset[:, None]) * zoom_y[:, None, None]
    boundaries = torch.where(shown[:, None] > 0, boundaries, torch.full_like(boundaries, torch.nan))
    y = offset[:, None] + torch.arange(SIZE, device=device)[None, :, None] / zoom_y[:, None, None]
    grid = torch.stack([(x[:, None].expand_as(y) * 2 + 1) / columns - 1, (y * 2 + 1) / rows - 1], -1)
    power = functional.grid_sample(scenes.power.float(), grid, "bilinear", "border", align_corners=False)
    power = power / STEPS_PER_DB + LOWEST_DB
    moved = functional.grid_sample(scenes.classes[:, None].float(), grid, "nearest", "zeros", align_corners=False)
    return power, boundaries, moved[:, 0].long(), shown


def _instruments(device: torch.device) -> Tensor:
    """`[4, 8]`: the optics of the four phantom instruments, in the order of `_Optics`."""
    table = []
    for dialect in DIALECTS.values():
        sigma = dialect.axial_resolution_um / 2.355 / ROW_UM
        exponent = 0.25 if dialect.compression == "fourth_root" else 0.02
        grain = 0.35 * dialect.small.grain[0] ** 0.5
        floor, bright = (value / 255 for value in dialect.window)
        table.append([dialect.looks, exponent, floor, bright, sigma, 0.2, grain, 0.4])
    return torch.tensor(table, device=device)


def _draw_optics(levels: Tensor, draws: Draws) -> _Optics:
    """Values by level: 0 one of four instruments, 1 near one of them, 2 anything."""
    n = len(levels)
    table = _instruments(levels.device)
    near = table[(draws.uniform(n) * len(table)).long()].unbind(1)
    level = levels.float()
    wide = (levels == 2).float()

    def mixed(base: Tensor, spread: float, low: float, high: float) -> Tensor:
        jittered = (base + level * spread * draws.normal(n)).clamp(low, high)
        return (1 - wide) * jittered + wide * draws.uniform(n, low=low, high=high)

    looks = torch.exp(
        (1 - wide) * (near[0].log() + 0.4 * level * draws.normal(n)) + wide * (0.4 + 3.5 * draws.uniform(n))
    )
    floor = mixed(near[2], 0.05, -0.15, 0.35)
    # A narrow window saturates the brightest layers, a wide one leaves them grey.
    bright = floor + ((1 - wide) * (near[3] - near[2]) + wide * draws.uniform(n, low=0.25, high=1.0))
    bright = bright * (1 + 0.1 * level.clamp(max=1) * draws.normal(n)).clamp(0.6, 1.4)
    return _Optics(
        looks=looks.clamp(1, 40),
        exponent=mixed(near[1], 0.02, 0.02, 0.4),
        floor=floor,
        bright=torch.maximum(bright, floor + 0.15),
        axial=mixed(near[4], 0.1, 0.15, 0.9),
        lateral=mixed(near[5], 0.1, 0.1, 0.9),
        grain_axial=mixed(near[6], 0.1, 0.2, 1.2),
        grain_lateral=mixed(near[7], 0.1, 0.2, 1.6),
    )


def _form(decibel: Tensor, sample: Tensor, boundaries: Tensor, levels: Tensor, draws: Draws) -> Tensor:
    """Display values 0..1 `[M, H, W]` of B-scans `[M, H, W]` in dB; `sample` says to which sample each belongs."""
    n, m = len(levels), len(sample)
    random = (levels > 0).float()
    optics = _draw_optics(levels, draws)
    rows = torch.linspace(0, 1, SIZE, device=decibel.device).view(1, SIZE, 1)
    columns = torch.linspace(0, 1, SIZE, device=decibel.device).view(1, 1, SIZE)
    # Gain of the eye and of the frame, slow waves along the columns, and loss of sensitivity with depth.
    gain = (1.7 + 1.3 * random) * draws.normal(n)
    wave = _waves(columns[0], n, draws) * (0.4 + 1.2 * random * draws.uniform(n))[:, None]
    slope = -(random * draws.uniform(n, low=-1.0, high=7.0))
    light = (gain[:, None] + wave)[sample][:, None] + slope[sample].view(m, 1, 1) * rows
    light = light + (0.6 * draws.normal(m)).view(m, 1, 1)
    # Below Bruch's membrane light is lost faster: 0 to 15 dB per mm, beyond what the phantom's choroid has.
    bruch = torch.nan_to_num(boundaries[:, 7], nan=float(SIZE))[sample][:, None]
    row = torch.arange(SIZE, device=decibel.device, dtype=torch.float32).view(1, SIZE, 1)
    loss = (random * draws.uniform(n, low=-0.02, high=0.12).clamp(min=0))[sample].view(m, 1, 1)
    light = light - loss * (row - bruch).clamp(min=0)
    power = torch.pow(10.0, (decibel + light) / 10)
    # Attenuation by the tissue above, up to 5 dB through a healthy retina.
    attenuation = (random * draws.uniform(n) * 1.2e-3)[sample].view(m, 1, 1)
    power = power * torch.exp(-attenuation * torch.cumsum(power.clamp(max=60), 1))
    power = power * _shadows(boundaries, random, draws)[sample]
    power = _blur(power, optics.axial[sample], optics.lateral[sample]) + 1
    field = _blur(draws.normal(m, SIZE, SIZE), optics.grain_axial[sample], optics.grain_lateral[sample], unit=True)
    looks = optics.looks[sample].view(m, 1, 1)
    power = power * (1 - 1 / (9 * looks) + field / (3 * looks.sqrt())).clamp(min=0.02) ** 3
    exponent, floor, bright = (v[sample].view(m, 1, 1) for v in (optics.exponent, optics.floor, optics.bright))
    display = floor + (bright - floor) * (power**exponent - 1) / (100.0**exponent - 1)
    # Some instruments smooth the image that they show; some files were converted to 8 bit by others.
    smooth = (random * draws.chance(n, share=0.3) * draws.uniform(n, low=0.3, high=1.1))[sample]
    display = _blur(display.clamp(0, 1), smooth + 0.01, smooth + 0.01)
    gamma = torch.exp(0.2 * random * draws.normal(n))[sample].view(m, 1, 1)
    noise = (random * draws.chance(n, share=0.4) * draws.uniform(n) * 0.08)[sample].view(m, 1, 1)
    return (display.clamp(min=1e-4) ** gamma + noise * draws.normal(m, SIZE, SIZE)).clamp(0, 1)


def _waves(columns: Tensor, n: int, draws: Draws) -> Tensor:
    """Smooth random curves `[N, W]` of about unit amplitude."""
    frequency, phase = draws.uniform(3, n, 1, low=0.3, high=4.0), draws.uniform(3, n, 1)
    return torch.sin(2 * math.pi * (frequency * columns + phase)).sum(0) / math.sqrt(3 / 2)


def _shadows(boundaries: Tensor, random: Tensor, draws: Draws) -> Tensor:
    """Factors `[N, H, W]`: dark columns below one of the boundaries, as vessels and debris cast them."""
    n = len(boundaries)
    device = boundaries.device
    columns = torch.arange(SIZE, device=device, dtype=torch.float32)
    centre = draws.uniform(n, _SHADOWS, 1) * SIZE
    width = torch.exp(draws.uniform(n, _SHADOWS, 1, low=0.0, high=2.6))
    depth = draws.uniform(n, _SHADOWS, 1, low=0.1, high=0.95) * draws.chance(n, _SHADOWS, 1, share=0.35)
    depth = depth * random.view(n, 1, 1)
    factor = torch.prod(1 - depth * torch.exp(-(((columns - centre) / width) ** 2)), dim=1)  # [N, W]
    start = boundaries[torch.arange(n, device=device), (draws.uniform(n) * 6).long()]
    start = torch.nan_to_num(start, nan=0.0)
    below = torch.arange(SIZE, device=device).view(1, SIZE, 1) > start[:, None]
    return torch.where(below, factor[:, None], torch.ones((), device=device))


def _blur(images: Tensor, sigma_rows: Tensor, sigma_columns: Tensor, unit: bool = False) -> Tensor:
    """Gaussian blur of `[M, H, W]`, each with its own widths in pixels; `unit` keeps the variance of white noise."""
    offsets = torch.arange(_KERNEL, device=images.device, dtype=torch.float32) - _KERNEL // 2
    x = images[None]
    for sigma, shape in ((sigma_rows, (-1, 1, _KERNEL, 1)), (sigma_columns, (-1, 1, 1, _KERNEL))):
        kernel = torch.exp(-0.5 * (offsets / sigma.clamp(min=0.05)[:, None]) ** 2)
        kernel = kernel / (kernel.square().sum(1, keepdim=True).sqrt() if unit else kernel.sum(1, keepdim=True))
        half = _KERNEL // 2
        pad = (0, 0, half, half) if shape[2] > 1 else (half, half, 0, 0)
        mode = "circular" if unit else "replicate"
        x = functional.conv2d(functional.pad(x, pad, mode), kernel.view(shape), groups=len(images))
    return x[0]


def _fill_borders(display: Tensor, sample: Tensor, n: int, draws: Draws) -> Tensor:
    """Replaces what registration leaves at the upper and lower edge: white, black, or the mean as after cleaning."""
    rows = torch.arange(SIZE, device=display.device, dtype=torch.float32).view(1, SIZE, 1)
    columns = (torch.arange(SIZE, device=display.device, dtype=torch.float32) - SIZE / 2).view(1, 1, SIZE)
    slope = (0.08 * draws.normal(n))[sample].view(-1, 1, 1)
    high = (draws.chance(n, share=0.3) * draws.uniform(n) * 34 - 30)[sample].view(-1, 1, 1)
    low = (draws.chance(n, share=0.3) * draws.uniform(n) * 34 - 30)[sample].view(-1, 1, 1)
    fill = (rows < high + slope * columns) | (rows > SIZE - low + slope * columns)
    kind = draws.uniform(n)[sample].view(-1, 1, 1)
    mean = display.mean((1, 2), keepdim=True)
    value = torch.where(kind < 0.7, mean, torch.where(kind < 0.85, torch.zeros_like(mean), torch.ones_like(mean)))
    return torch.where(fill, value.expand_as(display), display)
