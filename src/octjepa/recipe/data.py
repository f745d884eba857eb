"""Sections of the data: which volumes take part, their canonical form, and how samples are drawn from them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, model_validator

from octjepa.recipe.base import (
    Axis,
    Device,
    Limits3,
    Positive,
    Section,
    Several,
    Share,
    Size3,
    Spacing3,
    Word,
    added,
    machine,
)
from octjepa.volume import AXES, Laterality, Pattern


class DataRecipe(Section):
    """Selects the volumes of the store, and how often each domain is drawn; docs/cohort.md explains every key.

    A criterion that is null (or empty) accepts every volume; a volume must meet all that are given. `strategy`
    single_domain takes one `device`, multi_domain every one or those of `devices`.
    """

    strategy: Literal["single_domain", "multi_domain"] = "multi_domain"
    device: Device | None = None
    devices: Several[Device] | None = None
    sites: Several[Word] | None = None
    regions: Several[Word] | None = None  # as in the index: "Macula", "Optic Disc", "Macula, 6 x 6"
    lateralities: Several[Laterality] | None = None  # OD, OS or both; scans of an unknown eye are excluded
    formats: Several[Word] | None = None
    patterns: Several[Pattern] = ("raster",)
    min_frames: Positive | None = None  # B-scans of the native scan
    max_frames: Positive | None = None
    min_spacing_mm: Limits3 | None = None  # (dz, dy, dx) of the native scan; null leaves an axis free
    max_spacing_mm: Limits3 | None = None
    min_quality: Share | None = 0.1  # below, the surfaces of the retina were hardly found; null includes such scans
    # Note codes of volumes that are left out; [] includes them.
    exclude_notes: tuple[Word, ...] = (
        "sparse_slices",
        "vertical_lines",
        "neighbours_unlike",
        "part_of_scan",
        "radial_by_content",
        "retina_doubtful",
    )
    exclude_uncertain: tuple[Axis, ...] = ()  # axes whose spacing must not be uncertain
    one_per: Literal["eye", "eye_and_visit", "eye_and_device"] | None = None  # only the volume of best quality
    max_samples: Positive | None = None
    balance: Literal["none", "device", "site", "device_and_site"] = "none"
    balance_power: Share = 0.0  # a domain of n volumes is drawn like n**power: 0: all alike, 1: by its size
    expected_volumes: Positive | None = machine(None)  # `plan` counts epochs with it when no store is named

    @model_validator(mode="after")
    def _device_belongs_to_single_domain(self) -> DataRecipe:
        if self.strategy == "single_domain" and self.device is None:
            raise ValueError("strategy single_domain needs data.device, such as topcon_triton")
        if self.strategy == "multi_domain" and self.device is not None:
            raise ValueError("data.device is unused by strategy multi_domain: say data.devices, or single_domain")
        if self.strategy == "single_domain" and self.devices is not None:
            raise ValueError("data.devices is unused by strategy single_domain, which only takes data.device: drop it")
        return self

    @model_validator(mode="after")
    def _limits_leave_something(self) -> DataRecipe:
        if self.min_frames is not None and self.max_frames is not None and self.min_frames > self.max_frames:
            raise ValueError(f"min_frames {self.min_frames} is above max_frames {self.max_frames}: nothing can pass")
        free = (None, None, None)
        for axis, low, high in zip(AXES, self.min_spacing_mm or free, self.max_spacing_mm or free, strict=True):
            if low is not None and high is not None and low > high:
                raise ValueError(f"min_spacing_mm {low} is above max_spacing_mm {high} ({axis}): nothing can pass")
        for name in ("min_spacing_mm", "max_spacing_mm"):
            if getattr(self, name) == free:
                raise ValueError(f"{name} limits no axis: give a number to one, or drop it")
        return self

    @model_validator(mode="after")
    def _balance_has_domains(self) -> DataRecipe:
        if self.balance == "none" and self.balance_power:
            raise ValueError("data.balance_power is unused by balance none: drop it, or name what to balance")
        one_device = self.device is not None or (self.devices is not None and len(self.devices) == 1)
        one_site = self.sites is not None and len(self.sites) == 1
        if (one_device and "device" in self.balance) or (one_site and "site" in self.balance):
            only = "device" if one_device and "device" in self.balance else "site"
            raise ValueError(f"balance {self.balance} has nothing to balance: the recipe takes a single {only}")
        return self


class Preprocessing(Section):
    """How a native scan becomes a canonical volume: the contract that store and weights share.

    The stored volume is `image_size` plus `margin` on both sides of each axis, so that training can crop by
    whole voxels. `flatten` removes the tilt (`plane`) or tilt and curvature (`quadratic`) of Bruch's membrane along
    depth by whole-voxel shifts, which are stored and reversible.
    """

    image_size: Size3 = (16, 128, 128)
    target_spacing_mm: Spacing3 = (0.36, 0.0078, 0.047)
    margin: tuple[int, int, int] = (0, 8, 8)
    orientation: Literal["OD", "native"] = "OD"
    flatten: Literal["none", "plane", "quadratic"] = "quadratic"
    axial_anchor: Share = 0.65  # depth of Bruch's membrane in the stored volume, 0 top, 1 bottom
    clip_percentiles: tuple[float, float] = (1.0, 99.8)

    @model_validator(mode="after")
    def _limits(self) -> Preprocessing:
        low, high = self.clip_percentiles
        if not 0 <= low < high <= 100:
            raise ValueError(f"clip_percentiles must rise within 0..100, got {self.clip_percentiles}")
        if min(self.margin) < 0:
            raise ValueError(f"margin must not be negative, got {self.margin}")
        return self

    @property
    def stored_size(self) -> tuple[int, int, int]:
        """`image_size` with the margin on both sides of each axis."""
        (d, h, w), (a, b, c) = self.image_size, self.margin
        return d + 2 * a, h + 2 * b, w + 2 * c


class TokenRecipe(Section):
    """Selects patches as tokens. `budget` tokens a volume with select: tissue; every patch with select: all."""

    patch_size: Size3 = (4, 16, 16)
    select: Literal["all", "tissue"] = "tissue"
    budget: Positive | None = None

    @model_validator(mode="after")
    def _budget_belongs_to_tissue(self) -> TokenRecipe:
        if self.select == "tissue" and self.budget is None:
            raise ValueError("tokens.select: tissue needs tokens.budget, the number of tokens a volume")
        if self.select == "all" and self.budget is not None:
            raise ValueError("tokens.budget is unused by tokens.select: all; drop it (tokens.budget=null)")
        return self


class MaskRecipe(Section):
    """How much is hidden, in which shapes, and how much of it is predicted. Shares of families are relative weights.

    `per_target` masks are drawn for each training view, and share one pass of the target encoder over it, which costs
    more than the student's over a few visible tokens (V-JEPA 2 draws 2, data2vec 2.0 up to 16).
    """

    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.6
    target_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    per_target: Annotated[int, Field(ge=1, le=16)] = 1
    tubes: Annotated[float, Field(ge=0)] = 1.0
    blocks: Annotated[float, Field(ge=0)] = 1.0
    runs: Annotated[float, Field(ge=0)] = 1.0
    random: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _one_family_at_least(self) -> MaskRecipe:
        if self.tubes + self.blocks + self.runs + self.random == 0:
            raise ValueError("every mask family has weight 0: give tubes, blocks, runs or random a positive weight")
        return self


class ViewRecipe(Section):
    """Random augmentations. Geometry is shared by the two views; photometric changes differ. 0 switches a change off.

    The default only crops and flips, as V-JEPA 2 does: where each view has another gain or blur, the encoder is taught
    to ignore brightness, which tells of disease.
    """

    flip_slow: Share = 0.5
    flip_fast: Share = 0.0
    crop: StrictBool = True
    rotation_degrees: Annotated[float, Field(ge=0, le=20)] = 0.0
    zoom: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    gain: Annotated[float, Field(ge=0, le=1)] = 0.0
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.0
    speckle: Annotated[float, Field(ge=0, le=2)] = 0.0
    blur: Share = 0.0
    # the context view from every other B-scan, the target view from those between (`octjepa ingest --halves`)
    halves: StrictBool = added(False)
