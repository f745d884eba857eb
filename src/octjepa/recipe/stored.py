"""Recipes stored by earlier versions: what they left unsaid, because there was no such key, is written out.

A stored recipe holds every key of the version that wrote it. A key that it lacks did not exist then, and what it
decides was done in one way, which need not be today's default.
"""

from __future__ import annotations

from typing import Any

# section -> key -> what every run did before there was such a key
_BEFORE: dict[str, dict[str, Any]] = {
    "checkpoint": {"export": "target"},
    "data": {"exclude_notes": ()},
    "model": {"stem": "linear"},
}


def with_earlier_defaults(stored: dict[str, Any]) -> dict[str, Any]:
    """A copy of the stored recipe in which no key of today is missing that would change what it describes."""
    first = "stem" not in stored.get("model", {})
    recipe: dict[str, Any] = {name: dict(value) if isinstance(value, dict) else value for name, value in stored.items()}
    for section, defaults in _BEFORE.items():
        recipe[section] = {**defaults, **recipe.get(section, {})}
    if first:  # the versions without a choice of stems
        if recipe["model"].get("positions") != "sincos":
            recipe["model"].setdefault("rope_base", 10_000.0)
        if recipe.get("objective", {}).get("name") == "mae":
            recipe["objective"]["name"] = "mae_patch_norm"
    if recipe.get("objective", {}).get("name") == "vjepa_dense":
        recipe["objective"].setdefault("visible_warmup", 0.0)
    return recipe
