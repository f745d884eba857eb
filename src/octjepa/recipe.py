"""The recipe: every setting of a run, typed, frozen, and refused when unknown or unused.

A recipe is data. Its fields are *science* (they change the result, and enter the hash that names the run)
or *machine* (where and how fast it runs; marked with `machine()`). `octjepa.config` reads and overrides them.
Founding values are in SCIENCE's notation: image_size and patch_size are `[D, H, W]`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidationInfo,
    field_validator,
    model_validator,
)

from octjepa.volume import AXES, Laterality, Pattern

DEVICES = ("heidelberg_spectralis", "topcon_maestro2", "topcon_triton", "zeiss_cirrus")

Device = Literal["heidelberg_spectralis", "topcon_maestro2", "topcon_triton", "zeiss_cirrus"]
Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Size3 = tuple[Positive, Positive, Positive]
Spacing3 = tuple[
    Annotated[float, Field(gt=0, le=5)], Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]
]
Limit = Annotated[float, Field(gt=0, le=5)] | None
Limits3 = tuple[Limit, Limit, Limit]
Axis = Literal["slice", "row", "column"]
Word = Annotated[str, Field(min_length=1, max_length=120)]
Item = TypeVar("Item")


def _each_once(items: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(items)) < len(items):
        raise ValueError("something is named twice")
    return items


Several = Annotated[tuple[Item, ...], Field(min_length=1), AfterValidator(_each_once)]


def _not_a_spelled_null(path: str | None) -> str | None:
    if path is not None and path.strip().lower() in {"", "none", "null", "~"}:
        raise ValueError(f"{path!r} is text, not a folder: write null without quotes to switch it off")
    return path


Directory = Annotated[str | None, AfterValidator(_not_a_spelled_null)]


def machine(default: Any = ..., **limits: Any) -> Any:
    """A field that says where or how fast a run goes, never what it computes; it stays out of the run's hash."""
    return Field(default, json_schema_extra={"machine": True}, **limits)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _a_switch_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic takes true for 1, and YAML 1.1 takes `yes` and `on` for true: base_lr: yes would be a rate of 1.
        parts = value if isinstance(value, list | tuple) else [value]
        field = cls.model_fields[str(info.field_name)]
        if field.annotation is not bool and any(isinstance(part, bool) for part in parts):
            raise ValueError("true, false, yes, no, on and off are switches, not a value for this key")
        return value


class DataRecipe(Section):
    """Which volumes of the store take part, and how often each domain is drawn; docs/cohort.md tells of every key.

    A criterion that is null (or empty) lets every volume pass; those given must all hold. `strategy` single_domain
    takes one `device`, multi_domain every one or those of `devices`.
    """

    strategy: Literal["single_domain", "multi_domain"] = "multi_domain"
    device: Device | None = None
    devices: Several[Device] | None = None
    sites: Several[Word] | None = None
    regions: Several[Word] | None = None  # as the index has them: "Macula", "Optic Disc", "Macula, 6 x 6"
    lateralities: Several[Laterality] | None = None  # OS alone or OD alone; a scan of unknown eye passes neither
    formats: Several[Word] | None = None
    patterns: Several[Pattern] = ("raster",)
    min_frames: Positive | None = None  # B-scans of the native scan
    max_frames: Positive | None = None
    min_spacing_mm: Limits3 | None = None  # (dz, dy, dx) of the native scan; null leaves an axis free
    max_spacing_mm: Limits3 | None = None
    min_quality: Share | None = None
    exclude_notes: tuple[Word, ...] = ()  # note codes, such as person_unknown
    exclude_uncertain: tuple[Axis, ...] = ()  # axes whose spacing must not be uncertain
    one_per: Literal["eye", "eye_and_visit", "eye_and_device"] | None = None  # keeps the volume of best quality
    max_samples: Positive | None = None
    balance: Literal["none", "device", "site", "device_and_site"] = "none"
    balance_power: Share = 0.0  # a domain of n volumes is drawn like n**power: 0 all alike, 1 as many as it has
    expected_volumes: Positive | None = machine(None)  # `plan` counts epochs with it when no store is named

    @model_validator(mode="after")
    def _device_belongs_to_single_domain(self) -> DataRecipe:
        if self.strategy == "single_domain" and self.device is None:
            raise ValueError("strategy single_domain needs data.device, one of " + ", ".join(DEVICES))
        if self.strategy == "multi_domain" and self.device is not None:
            raise ValueError("data.device is unused by strategy multi_domain: say data.devices, or single_domain")
        if self.strategy == "single_domain" and self.devices is not None:
            raise ValueError("data.devices is unused by strategy single_domain, which takes data.device alone: drop it")
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
            raise ValueError(f"balance {self.balance} has nothing to balance: the recipe takes one {only} alone")
        return self


class Preprocessing(Section):
    """How a native scan becomes a canonical volume: the contract that store and weights share.

    The stored volume is `image_size` plus `margin` on both sides of each axis, so that training can crop by
    whole voxels. `flatten` takes the tilt (`plane`) or tilt and curvature (`quadratic`) of Bruch's membrane out of
    the axial axis by whole-voxel shifts, which are kept and reversible.
    """

    image_size: Size3 = (16, 128, 128)
    target_spacing_mm: Spacing3 = (0.36, 0.0078, 0.047)
    margin: tuple[int, int, int] = (0, 8, 8)
    orientation: Literal["OD", "native"] = "OD"
    flatten: Literal["none", "plane", "quadratic"] = "quadratic"
    axial_anchor: Share = 0.65  # where Bruch's membrane lies in the stored height, 0 top, 1 bottom
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
        (d, h, w), (a, b, c) = self.image_size, self.margin
        return d + 2 * a, h + 2 * b, w + 2 * c


class TokenRecipe(Section):
    """Which patches become tokens. `budget` tokens a volume with select: tissue; every patch with select: all."""

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
    """How much is hidden, in which shapes, and how much of it is predicted. Shares of families are relative weights."""

    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.6
    target_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    tubes: Annotated[float, Field(ge=0)] = 1.0
    blocks: Annotated[float, Field(ge=0)] = 1.0
    runs: Annotated[float, Field(ge=0)] = 1.0

    @model_validator(mode="after")
    def _one_family_at_least(self) -> MaskRecipe:
        if self.tubes + self.blocks + self.runs == 0:
            raise ValueError("every mask family has weight 0: give tubes, blocks or runs a positive weight")
        return self


class ViewRecipe(Section):
    """What is random. Geometry is shared by the two views; photometric changes differ. 0 switches a change off."""

    flip_slow: Share = 0.5
    flip_fast: Share = 0.0
    crop: StrictBool = True
    rotation_degrees: Annotated[float, Field(ge=0, le=20)] = 0.0
    zoom: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    gain: Annotated[float, Field(ge=0, le=1)] = 0.15
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.15
    speckle: Annotated[float, Field(ge=0, le=2)] = 0.15
    blur: Share = 0.2


class ModelRecipe(Section):
    """The encoder by size name; `predictor_*` default to the arm's own (null)."""

    size: Literal["test", "founding", "small", "base", "large"] = "test"
    positions: Literal["rope", "rope_tiled", "sincos"] = "rope"  # tiled: as the released V-JEPA 2 weights
    position_unit: Literal["index", "mm"] = "index"
    predictor_width: Positive | None = None
    predictor_depth: Positive | None = None
    warm_start: Directory = None  # weights of V-JEPA 2 in Hugging Face form, or of ours; null: from scratch


class ObjectiveRecipe(Section):
    """The arm, and the EMA target: momentum rises from ema_base to ema_final along half a cosine.

    `visible_weight` is that of the loss at visible tokens (arm vjepa_dense, 0.5 unless given). A regulariser is off
    when null, a meter at weight 0, a term of the loss above.
    """

    name: Literal["vjepa", "vjepa_dense", "normalized_mse", "mae"] = "vjepa"
    visible_weight: Annotated[float, Field(ge=0)] | None = None
    variance_covariance: Annotated[float, Field(ge=0)] | None = None
    sigreg: Annotated[float, Field(ge=0)] | None = None
    ema_base: Annotated[float, Field(ge=0, lt=1)] = 0.996
    ema_final: Annotated[float, Field(ge=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _momentum_does_not_fall(self) -> ObjectiveRecipe:
        if self.ema_final < self.ema_base:
            raise ValueError(f"ema_final {self.ema_final} is below ema_base {self.ema_base}: momentum must not fall")
        return self

    @model_validator(mode="after")
    def _visible_weight_belongs_to_dense(self) -> ObjectiveRecipe:
        if self.visible_weight is not None and self.name != "vjepa_dense":
            raise ValueError(f"objective.visible_weight is unused by {self.name}: drop it, or say vjepa_dense")
        return self

    @property
    def at_visible(self) -> float:
        """The weight of the loss at visible tokens."""
        return 0.5 if self.visible_weight is None else self.visible_weight


class TrainRecipe(Section):
    """Optimiser, schedule (in optimiser updates) and batch. Exactly one of max_updates and epochs is given."""

    max_updates: Positive | None = None
    epochs: Positive | None = None
    global_batch: Positive = 32
    base_lr: Annotated[float, Field(gt=0, le=1)] = 1e-4
    min_lr_ratio: Share = 0.1
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.03
    schedule: Literal["cosine", "constant"] = "cosine"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    precision: Literal["fp32", "bf16"] = "bf16"
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _one_length(self) -> TrainRecipe:
        if (self.max_updates is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.max_updates and train.epochs (the other null)")
        return self


class ValidationRecipe(Section):
    """Held-out people; geometry, tokens and masks fixed by volume. every_updates null: only at the end."""

    every_updates: Positive | None = None
    max_samples: Positive | None = 64


class MonitorRecipe(Section):
    """How often, and on how many held-out volumes, the meters of `octjepa.train.monitor` are taken. null: never."""

    every_updates: Positive | None = machine(200)
    volumes: Positive = machine(32)


class CheckpointRecipe(Section):
    """Where and how often. dir null is off; a relative dir lies in the run folder."""

    dir: Directory = machine("checkpoints")
    every_updates: Positive | None = machine(500)  # null: only at the end
    keep_last: Positive = machine(3)


class TrackingRecipe(Section):
    """Where figures and pictures go beside the run folder; docs/tracking.md. Nothing leaves the machine by default."""

    backends: Annotated[
        tuple[Literal["wandb", "wandb_offline", "tensorboard", "mlflow"], ...], AfterValidator(_each_once)
    ] = machine(())
    project: Word = machine("octjepa")
    name: Word | None = machine(None)  # null: the recipe's
    pictures_every_updates: Positive | None = machine(500)  # and at the start; null: never
    send_pictures: StrictBool = machine(False)  # views of scans to W&B and MLflow, too

    @model_validator(mode="after")
    def _what_is_sent_is_drawn(self) -> TrackingRecipe:
        if {"wandb", "wandb_offline"} <= set(self.backends):
            raise ValueError("backends wandb and wandb_offline are the same run twice: name one of them")
        servers = set(self.backends) - {"tensorboard"}
        if self.send_pictures and (not servers or self.pictures_every_updates is None):
            raise ValueError("send_pictures is unused without wandb or mlflow, or without pictures_every_updates")
        return self


class MachineRecipe(Section):
    """Nothing here changes a result beyond rounding."""

    devices: Positive | None = machine(None)  # the number the recipe is meant for; null: whatever is there
    micro_batch: Positive | None = machine(None)  # volumes a device takes at once; null: the whole share
    loader_workers: Annotated[int, Field(ge=0)] = machine(0)
    compile: StrictBool = machine(False)  # each block by torch.compile: faster updates after a slow first one
    # blocks keep their input alone for the backward pass: less memory, more time
    recompute: StrictBool = machine(False)


class Recipe(Section):
    """One run. `science()` is what names it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    data: DataRecipe = DataRecipe()
    preprocessing: Preprocessing = Preprocessing()
    tokens: TokenRecipe
    masks: MaskRecipe = MaskRecipe()
    views: ViewRecipe = ViewRecipe()
    model: ModelRecipe = ModelRecipe()
    objective: ObjectiveRecipe = ObjectiveRecipe()
    train: TrainRecipe
    validation: ValidationRecipe = ValidationRecipe()
    monitor: MonitorRecipe = MonitorRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    tracking: TrackingRecipe = TrackingRecipe()
    machine: MachineRecipe = MachineRecipe()

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        for axis, size, patch in zip("DHW", self.preprocessing.image_size, self.tokens.patch_size, strict=True):
            if size % patch:
                raise ValueError(f"image_size {size} is no multiple of patch_size {patch} along {axis}")
        budget = self.tokens.budget
        if budget is not None and budget > self.grid_tokens:
            raise ValueError(f"tokens.budget {budget} is more than the grid's {self.grid_tokens} tokens")
        counts = self.mask_counts
        if min(counts) < 1:
            raise ValueError(f"masks leave {counts[0]} context and {counts[1]} target tokens: each needs one at least")
        added = max(self.objective.variance_covariance or 0.0, self.objective.sigreg or 0.0)
        if added > 0 and self.machine.micro_batch is not None:
            raise ValueError(
                "a regulariser looks at the spread within what it is given: machine.micro_batch would change the "
                "result; set it to null, or the regulariser to 0 (a meter)"
            )
        if self.objective.name == "normalized_mse" and self.model.predictor_depth is not None:
            raise ValueError("model.predictor_depth is unused by objective normalized_mse (a 2-layer MLP); drop it")
        return self

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens per axis."""
        (d, h, w), (p, q, r) = self.preprocessing.image_size, self.tokens.patch_size
        return d // p, h // q, w // r

    @property
    def grid_tokens(self) -> int:
        d, h, w = self.grid
        return d * h * w

    @property
    def token_count(self) -> int:
        """Tokens a volume that the encoders see: K."""
        return self.tokens.budget or self.grid_tokens

    @property
    def mask_counts(self) -> tuple[int, int]:
        """(context, target) tokens a volume, the same for every sample."""
        masked = round(self.masks.ratio * self.token_count)
        return self.token_count - masked, round(self.masks.target_share * masked)
