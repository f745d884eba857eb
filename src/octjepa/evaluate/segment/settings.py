"""The settings of a segmentation head: a small recipe of its own, by name (`segment_linear`) or as a YAML file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from octjepa.config import parse_yaml
from octjepa.errors import RecipeError
from octjepa.recipe import Section

_FOLDER = Path(__file__).parent / "recipes"
Whole = Annotated[int, Field(gt=0)]


class DecoderSettings(Section):
    """The convolutional decoder and how it is trained. With `encoder_decay` the encoder learns, too.

    Its last block then learns at lr x encoder_decay, each one below at a rate so many times lower.
    """

    width: Whole = 8  # channels at full resolution
    updates: Whole = 400
    batch: Whole = 2  # windows
    lr: Annotated[float, Field(gt=0, le=1)] = 3e-3
    encoder_decay: Annotated[float, Field(gt=0, le=1)] | None = None  # null: frozen


class SegmentRecipe(Section):
    """How a head is made and judged; docs/segment.md tells of every key. Without `decoder` it is the linear head."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    decoder: DecoderSettings | None = None
    columns: Whole = 4  # stored columns that the linear head and the prior answer for together
    centre: Literal["labels", "scan"] = "labels"  # of the ETDRS grid: the fovea where labels know it, or the scan's
    first_bscan: Literal["inferior", "superior"] = "inferior"  # where a file does not say how its B-scans lie
    seed: Annotated[int, Field(ge=0)] = 0
    resamples: Whole = 2000

    @property
    def head(self) -> str:
        """What stands in rows and logs."""
        if self.decoder is None:
            return "linear"
        return "decoder" if self.decoder.encoder_decay is None else "decoder, tuned"

    @property
    def tuned(self) -> bool:
        return self.decoder is not None and self.decoder.encoder_decay is not None


def recipe_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_settings(name_or_path: str | Path, overrides: Iterable[str] = ()) -> SegmentRecipe:
    """A shipped recipe or a YAML file, `key=value` overrides applied. Raises RecipeError."""
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        path = _FOLDER / f"{name_or_path}.yaml"
    if not path.is_file():
        raise RecipeError(
            f"no segmentation recipe {str(name_or_path)!r}: give a .yaml file, a head's folder to apply, or one of "
            f"{', '.join(recipe_names())}"
        )
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read as a text file: {error}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path} holds {type(data).__name__}, expected a mapping of keys")
    data.setdefault("name", path.stem)
    for override in overrides:
        key, sign, text = override.partition("=")
        section, _, leaf = key.strip().rpartition(".")
        if not sign or not leaf or section not in ("", "decoder"):
            raise RecipeError(f"override {override!r} is not of the form key=value, such as decoder.updates=100")
        value = parse_yaml(text, f"override {override!r}") if text.strip() else None
        if section:
            data[section] = {**(data.get(section) or {}), leaf: value}
        else:
            data[leaf] = value
    return settings_from(data, str(name_or_path))


def settings_from(data: dict[str, Any], where: str) -> SegmentRecipe:
    """Raises RecipeError listing every fault."""
    try:
        return SegmentRecipe.model_validate(data)
    except ValidationError as error:
        known = ", ".join(SegmentRecipe.model_fields)
        faults = []
        for item in error.errors():
            key = ".".join(map(str, item["loc"]))
            says = f"unknown key; known: {known}" if item["type"] == "extra_forbidden" else item["msg"]
            faults.append("  " + (f"{key}: " if key else "") + says.removeprefix("Value error, "))
        raise RecipeError(f"segmentation recipe {where} is refused:\n" + "\n".join(faults)) from None
