"""Base of every section of a recipe: types with limits, the mark of machine fields, and checks of raw values."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, ValidationInfo, field_validator

# The instruments of AI-READI: its folders, and what phantoms imitate. A store may hold any others.
DEVICES = ("heidelberg_spectralis", "topcon_maestro2", "topcon_triton", "zeiss_cirrus")

Precision = Literal["auto", "fp32", "bf16"]  # auto: bf16 if it is faster on the device, else fp32
Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Size3 = tuple[Positive, Positive, Positive]
Spacing3 = tuple[
    Annotated[float, Field(gt=0, le=5)], Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]
]
Limit = Annotated[float, Field(gt=0, le=5)] | None
Limits3 = tuple[Limit, Limit, Limit]
Axis = Literal["slice", "depth", "column"]
Word = Annotated[str, Field(min_length=1, max_length=120)]
Item = TypeVar("Item")


def without_repeats(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """The items as they are. Raises ValueError if a value is listed twice."""
    if len(set(items)) < len(items):
        raise ValueError("a value is listed twice: remove one")
    return items


def _device_name(name: str) -> str:
    """A name as the store has it. Raises ValueError if it can be none of them."""
    if not re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", name):
        raise ValueError(
            f"{name!r} is not a device: expected make and model as a store names them, like optovue_avanti"
        )
    return name


Device = Annotated[str, Field(max_length=60), AfterValidator(_device_name)]
Several = Annotated[tuple[Item, ...], Field(min_length=1), AfterValidator(without_repeats)]


def _refuse_null_as_text(path: str | None) -> str | None:
    if path is not None and path.strip().lower() in {"", "none", "null", "~"}:
        raise ValueError(f"{path!r} is text, not a folder: write null without quotes to switch it off")
    return path


Directory = Annotated[str | None, AfterValidator(_refuse_null_as_text)]


def machine(default: Any = ..., **limits: Any) -> Any:
    """A field for where or how fast a run goes, never what it computes; it is not part of the run's hash."""
    return Field(default, json_schema_extra={"machine": True}, **limits)


def added(default: Any, **limits: Any) -> Any:
    """A field that earlier versions did not have: at its default it is not part of a run's hash, which stays."""
    return Field(default, json_schema_extra={"added": True}, **limits)


class Section(BaseModel):
    """A frozen part of a recipe that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic takes true for 1, and YAML 1.1 takes `yes` and `on` for true: base_lr: yes would be a rate of 1.
        parts = value if isinstance(value, list | tuple) else [value]
        field = cls.model_fields[str(info.field_name)]
        if field.annotation not in (bool, StrictBool | None) and any(isinstance(part, bool) for part in parts):
            raise ValueError("true, false, yes, no, on and off are switches, not a value for this key")
        return value
