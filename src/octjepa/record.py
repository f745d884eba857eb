"""Frozen dataclasses with one JSON form: what a command writes, and what a page or a later command reads.

A class that inherits from `Record` states its fields once. `to_json` gives plain data and `from_json` reads it back,
nested records included, so that no reader depends on string keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from octjepa.errors import UsageError

R = TypeVar("R", bound="Record")


class Record:
    """A frozen dataclass with one JSON form.

    ALIASES: the keys that differ from the names of their fields. KEYS: all keys in order, if that is not the order of
    the fields. OMITTED: keys that are left out if the value is None.
    """

    KEYS: ClassVar[tuple[str, ...]] = ()
    ALIASES: ClassVar[Mapping[str, str]] = {}  # JSON key -> field
    OMITTED: ClassVar[tuple[str, ...]] = ()
    __slots__ = ()  # so that a class may have them

    @classmethod
    def _keys(cls) -> tuple[str, ...]:
        key_of = {name: key for key, name in cls.ALIASES.items()}
        return cls.KEYS or tuple(key_of.get(field.name, field.name) for field in fields(cls))  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        values = {key: plain(getattr(self, self.ALIASES.get(key, key))) for key in self._keys()}
        return {key: value for key, value in values.items() if value is not None or key not in self.OMITTED}

    @classmethod
    def from_json(cls: type[R], data: Mapping[str, Any]) -> R:
        """The record with this JSON form; unknown keys are ignored. Raises UsageError: a required key is missing."""
        names = {key: cls.ALIASES.get(key, key) for key in data}
        known_fields = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
        hints: Mapping[str, Any] = _hints(cls)  # type: ignore[arg-type]  # classes are hashable
        values = {
            names[key]: _typed(hints[names[key]], value) for key, value in data.items() if names[key] in known_fields
        }
        missing = [
            name
            for name, known_field in known_fields.items()
            if name not in values and known_field.default is MISSING and known_field.default_factory is MISSING
        ]
        if missing:
            raise UsageError(f"a result lacks {', '.join(missing)}: it has {', '.join(map(str, data)) or 'no key'}")
        return cls(**values)


def to_json(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Plain data of several records."""
    return [record.to_json() for record in records]


def plain(value: Any) -> Any:
    """JSON data of a value: of records and recipes, also in lists, tuples and mappings; a path becomes text."""
    if isinstance(value, Record):
        return value.to_json()
    if hasattr(value, "model_dump"):  # a recipe; pydantic is not imported here, so that --help does not load it
        return value.model_dump(mode="json")
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


@cache
def _hints(kind: type[Record]) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _typed(hint: Any, value: Any) -> Any:
    """JSON data as the type of its field."""
    if value is None:
        return None
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _typed(next(argument for argument in arguments if argument is not type(None)), value)
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.from_json(value)
    if isinstance(hint, type) and hasattr(hint, "model_validate"):
        return hint.model_validate(value)
    if hint is Path:
        return Path(value)
    if origin in (tuple, list):
        return origin(_typed(arguments[0], item) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _typed(arguments[1], item) for key, item in value.items()}
    return value
