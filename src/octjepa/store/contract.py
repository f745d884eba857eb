"""store.json: the schema of a store and the contract its volumes were made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octjepa.config import science_hash
from octjepa.errors import ContractError, UsageError
from octjepa.recipe import Preprocessing, Recipe
from octjepa.store.canonical import CANONICAL_VERSION

MARKER = "store.json"
SCHEMA_VERSION = 1


def contract_of(preprocessing: Preprocessing) -> dict[str, Any]:
    """What store.json says of a store that is made now."""
    return {
        "schema_version": SCHEMA_VERSION,
        "canonical_version": CANONICAL_VERSION,
        "contract": preprocessing.model_dump(mode="json"),
        "contract_hash": science_hash(preprocessing),
    }


def read_contract(store: Path) -> tuple[Preprocessing, int]:
    """(preprocessing, version of the canonicalisation). Raises UsageError: not a store, a newer schema, damaged."""
    marker = store / MARKER
    if not marker.is_file():
        raise UsageError(f"{store} is no store (it has no {MARKER}): make one with `octjepa ingest`")
    try:
        found = json.loads(marker.read_text(encoding="utf-8"))
        schema = int(found["schema_version"])
        if schema > SCHEMA_VERSION:
            raise UsageError(
                f"the store {store} has schema {schema}, this octjepa reads up to {SCHEMA_VERSION}: update octjepa"
            )
        preprocessing = Preprocessing.model_validate(found["contract"])
        return preprocessing, int(found.get("canonical_version", 0))  # the first stores did not say
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{marker} cannot be read as a store's contract: {error}") from None


def contract_differences(preprocessing: Preprocessing, recipe: Recipe) -> list[str]:
    """Every field in which a store's preprocessing differs from the recipe's, as "field: store VALUE, recipe VALUE"."""
    ours, theirs = preprocessing.model_dump(), recipe.preprocessing.model_dump()
    return [f"{name}: store {ours[name]}, recipe {theirs[name]}" for name in theirs if theirs[name] != ours[name]]


def refuse_another_contract(location: str, made_with: tuple[Preprocessing, int], asked: Preprocessing) -> None:
    """Raises ContractError: another canonicalisation made the store at `location`, or every field that differs."""
    preprocessing, canonical_version = made_with
    if canonical_version != CANONICAL_VERSION:
        raise ContractError(
            f"the store {location} was made by canonicalisation {canonical_version}, this octjepa makes "
            f"{CANONICAL_VERSION}: volumes of both would not be comparable; ingest into a new --store folder"
        )
    if science_hash(preprocessing) == science_hash(asked):
        return
    ours, theirs = preprocessing.model_dump(mode="json"), asked.model_dump(mode="json")
    diff = "\n".join(
        f"  preprocessing.{key}: store {ours[key]}, asked {theirs[key]}" for key in ours if ours[key] != theirs[key]
    )
    raise ContractError(
        f"the store {location} was made with another preprocessing contract:\n{diff}\n"
        "name another --store folder for these settings, or use a recipe with the store's"
    )
