"""Reads a recipe by name or path, with dotted overrides, into a frozen model, or raises a `RecipeError` with reasons.

`octjepa.yaml_text` reads YAML with decimal numbers, within limits; a key given twice is refused.
A file may extend another recipe: `extends: tiny_cpu`, or a path relative to the file; its own keys take precedence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from octjepa import parsing, yaml_text
from octjepa.errors import RecipeError
from octjepa.parsing import shown
from octjepa.recipe import Recipe

Model = TypeVar("Model", bound=BaseModel)
_SUFFIXES = {".yaml", ".yml"}
_MOST_EXTENDED = 20  # recipes of which each extends the next
_MOST_FAULTS = 30  # of a recipe that one message lists


def parse_yaml(text: str, where: str) -> Any:
    """YAML text -> plain data. Raises RecipeError naming `where` and the line."""
    try:
        return yaml_text.parse_yaml(text)
    except parsing.Malformed as error:
        raise RecipeError(f"{where} is not readable YAML: {error}") from None


@dataclass(frozen=True)
class RecipeKind(Generic[Model]):
    """A kind of recipe: the model that validates it, the folder of the package's own, and the noun for messages.

    `example` is an override that it accepts; `alternative` a hint for messages if there is no such recipe.
    """

    model: type[Model]
    folder: Path
    noun: str
    example: str
    alternative: str = ""

    def names(self) -> list[str]:
        """Names of the recipes that come with the package."""
        return sorted(path.stem for path in self.folder.glob("*.yaml"))

    def load(self, name_or_path: str | Path, overrides: Iterable[str] = ()) -> Model:
        """The recipe `name_or_path` (a name of the package's own or a YAML file) with `a.b=value` overrides, in order.

        Raises RecipeError: no such recipe, not YAML, an unknown, unused or ill-typed key.
        """
        return self.changed(self.parse(name_or_path), overrides, str(name_or_path))

    def changed(self, data: dict[str, Any], overrides: Iterable[str], where: str) -> Model:
        """Plain data with `a.b=value` overrides, in order -> recipe. `data` is changed. Raises RecipeError."""
        for override in overrides:
            self._apply(data, override)
        return self.read(data, where)

    def parse(self, name_or_path: str | Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
        """The keys of a recipe's file, those of the recipes that it extends below them, and its name; unchecked.

        Raises RecipeError: no such recipe, not YAML, a recipe that extends itself.
        """
        path = self.path_of(name_or_path)
        if len(extended_by) > _MOST_EXTENDED:
            raise RecipeError(f"{path}: more than {_MOST_EXTENDED} recipes extend one another: put their keys together")
        if path.resolve() in extended_by:
            circle = " -> ".join(recipe_file.name for recipe_file in (*extended_by, path))
            raise RecipeError(f"{path} extends itself ({circle}): take one `extends` out")
        data = self.read_keys(path)
        base = data.pop("extends", None)
        if base is not None:
            if not isinstance(base, str):
                raise RecipeError(f"{path}: extends names one recipe, by its name or path, not {shown(base)}")
            beside = path.parent / base  # absolute paths stay
            recipe_path = beside if beside.suffix in _SUFFIXES else base
            below = self.parse(recipe_path, (*extended_by, path.resolve()))
            below.pop("name", None)
            data = _merged(below, data)
        data.setdefault("name", path.stem)
        return data

    def path_of(self, name_or_path: str | Path) -> Path:
        """The file of a recipe. Raises RecipeError if there is none."""
        path = Path(name_or_path)
        if path.suffix not in _SUFFIXES:
            path = self.folder / f"{name_or_path}.yaml"
        if not path.is_file():
            expected = f"give the path of a .yaml file, {self.alternative}or one of {', '.join(self.names())}"
            raise RecipeError(f"no {self.noun} {str(name_or_path)!r}: {expected}")
        return path

    def read_keys(self, path: Path) -> dict[str, Any]:
        """The keys in a recipe's file, `extends` among them; unchecked. Raises RecipeError: not YAML, no mapping."""
        try:
            text = parsing.read_text(path, yaml_text.YAML_BYTES)
        except OSError as error:
            raise RecipeError(f"{path} cannot be read: {error.strerror}") from None
        except parsing.Malformed as error:
            raise RecipeError(f"{path} cannot be read as a text file: {error}") from None
        data = parse_yaml(text, str(path))
        if not isinstance(data, dict):
            raise RecipeError(f"{path} holds {type(data).__name__}, expected a mapping of the keys of a {self.noun}")
        return data

    def read(self, data: dict[str, Any], where: str) -> Model:
        """Plain data -> recipe. Raises RecipeError listing every fault at once."""
        try:
            return self.model.model_validate(data)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            faults = [f"  {_fault(self.model, dict(item))}" for item in errors[:_MOST_FAULTS]]
            if len(errors) > _MOST_FAULTS:
                faults.append(f"  and {len(errors) - _MOST_FAULTS:,} more")
            raise RecipeError("\n".join([f"{self.noun} {where} is refused:", *faults])) from None

    def _apply(self, data: dict[str, Any], override: str) -> None:
        key, sign, text = override.partition("=")
        parts = key.strip().split(".")
        if not sign or not all(parts):
            raise RecipeError(f"override {override!r} is not of the form key=value, such as {self.example}")
        section = data
        for part in parts[:-1]:
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                raise RecipeError(f"override {override!r}: {part!r} is a value, not a section")
        section[parts[-1]] = parse_yaml(text, f"override {override!r}") if text.strip() else None


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the keys of `above`, section by section; anything but a section is replaced as a whole."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = _merged(below[key], value) if both else value
    return merged


def _fault(model: type[BaseModel], item: dict[str, Any]) -> str:
    location = [str(part)[:120] for part in item["loc"]]
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key{_nearest(model, location)}"
    if item["type"] == "missing":
        return f"{key}: missing"
    message = item["msg"].removeprefix("Value error, ")[:2000]
    value = item.get("input")
    found_text = "" if isinstance(value, dict | BaseModel) else f" (found {shown(value)})"
    return f"{key}: {message}{found_text}" if key else message


def _nearest(model: type[BaseModel], location: list[str]) -> str:
    import difflib

    for part in location[:-1]:
        kind = model.model_fields[part].annotation
        model = next(part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, BaseModel))
    names = list(model.model_fields)
    for section, field in model.model_fields.items():
        inner = [part for part in (field.annotation, *get_args(field.annotation)) if isinstance(part, type)]
        if any(issubclass(part, BaseModel) and location[-1] in part.model_fields for part in inner):
            return f"; did you mean {section}.{location[-1]}?"
    close = difflib.get_close_matches(location[-1], names, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; known here: " + ", ".join(names)


PRETRAINING = RecipeKind(Recipe, Path(str(files("octjepa"))) / "recipes", "recipe", "train.base_lr=1e-4")


def load_recipe(name_or_path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe of pretraining, as `RecipeKind.load`. Raises RecipeError."""
    return PRETRAINING.load(name_or_path, overrides)


def stored_recipe(data: dict[str, Any], where: str) -> Recipe:
    """The recipe that a checkpoint, an exported encoder or a run folder holds. It states every key.

    Raises RecipeError listing every fault at once.
    """
    try:
        return PRETRAINING.read(data, where)
    except RecipeError as error:
        raise RecipeError(
            f"{error}\noctjepa {version('octjepa')} does not write such a recipe. If you did not edit it, use the "
            "version of octjepa that wrote it. For a run, run.json names that version"
        ) from None


def load_run_recipe(path: Path) -> Recipe:
    """`stored_recipe` of a run's recipe.yaml, which holds every key. Raises RecipeError, also if it extends another.

    A run may come from a stranger, and another recipe may be any file of this machine.
    """
    data = PRETRAINING.read_keys(path)
    if "extends" in data:
        raise RecipeError(f"{path} extends another recipe, which no run stores: it is not read")
    return stored_recipe({"name": path.stem, **data}, str(path))


def to_yaml(recipe: BaseModel) -> str:
    """The resolved recipe, every key written out; `RecipeKind.load` reads it back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def science(model: BaseModel) -> dict[str, Any]:
    """The fields that change the result, as plain data (machine fields and the recipe's name left out)."""
    fields: dict[str, Any] = {}
    for name, info in type(model).model_fields.items():
        extra = info.json_schema_extra
        is_label = name == "name" and isinstance(model, Recipe)
        if is_label or (isinstance(extra, dict) and extra.get("machine")):
            continue
        value = getattr(model, name)
        if isinstance(extra, dict) and extra.get("added") and value == info.default:
            continue
        fields[name] = science(value) if isinstance(value, BaseModel) else value
    return {key: value for key, value in fields.items() if value != {}}


def science_hash(model: BaseModel) -> str:
    """Hex SHA-256 of the science fields, the same on every machine."""
    return hashlib.sha256(json.dumps(science(model), sort_keys=True).encode()).hexdigest()
