"""store.json: the schema of a store and the preprocessing contract its volumes were made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from octjepa.config import science_hash
from octjepa.errors import ContractError, UsageError
from octjepa.parsing import read_object
from octjepa.recipe import Preprocessing
from octjepa.store.storage import MARKER
from octjepa.volume import CANONICAL_VERSION

SCHEMA_VERSION = 1
OLDEST_SCHEMA = 1  # what a change of schema has to raise, unless it brings a migration


class StoreContract(NamedTuple):
    """The content of store.json. `halves`: volumes are stored with both halves of their B-scans, if these are dense.

    `bscan_slices`: the store holds single B-scans, and each fills so many stored slices; 0: it holds volumes.
    """

    preprocessing: Preprocessing
    canonical_version: int
    halves: bool
    bscan_slices: int


def contract_text(preprocessing: Preprocessing, halves: bool = False, bscan_slices: int = 0) -> str:
    """The text of store.json for a store that is made now."""
    contract: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "canonical_version": CANONICAL_VERSION,
        "contract": preprocessing.model_dump(mode="json"),
        "contract_hash": science_hash(preprocessing),
    }
    if halves:
        contract["halves"] = True
    if bscan_slices:
        contract["bscan_slices"] = bscan_slices
    return json.dumps(contract, indent=1, sort_keys=True)


def read_contract(store: Path) -> StoreContract:
    """The contract of the store in a folder.

    Raises UsageError: not a store, a newer or too old schema, a damaged store.json.
    """
    marker = store / MARKER
    if not marker.is_file():
        raise UsageError(f"{store} is not a store (it has no {MARKER}): make one with `octjepa ingest`")
    try:
        content = read_object(marker)
        schema = int(content.get("schema_version", 0))
        if schema > SCHEMA_VERSION:
            raise UsageError(f"the store {store} has schema {schema}, this octjepa reads {_readable()}: update octjepa")
        if schema < OLDEST_SCHEMA:
            raise UsageError(
                f"the store {store} has schema {schema}, this octjepa reads {_readable()}: "
                "ingest the scans again into a new --store folder, or use the octjepa that wrote it"
            )
        preprocessing = Preprocessing.model_validate(content["contract"])
        version = int(content["canonical_version"])
        bscan_slices = int(content.get("bscan_slices", 0))
        if not 0 <= bscan_slices <= preprocessing.image_size[0]:
            raise ValueError(f"bscan_slices is {bscan_slices}")
        return StoreContract(preprocessing, version, bool(content.get("halves", False)), bscan_slices)
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(
            f"{marker} cannot be read as a store's contract ({type(error).__name__}: {str(error)[:300]}): restore the "
            "file, or ingest the scans again into a new --store folder"
        ) from None


def _readable() -> str:
    return f"schema {SCHEMA_VERSION}" if OLDEST_SCHEMA == SCHEMA_VERSION else f"{OLDEST_SCHEMA} to {SCHEMA_VERSION}"


def contract_differences(preprocessing: Preprocessing, expected: Preprocessing, whose: str = "store") -> list[str]:
    """Every field in which the preprocessing of a store, or of what `whose` names, differs from that of a recipe.

    As "field: store VALUE, recipe VALUE".
    """
    ours, expected_values = preprocessing.model_dump(), expected.model_dump()
    return [
        f"{name}: {whose} {ours[name]}, recipe {expected_values[name]}"
        for name in expected_values
        if expected_values[name] != ours[name]
    ]


def check_same_contract(
    location: str, preprocessing: Preprocessing, canonical_version: int, requested: Preprocessing
) -> None:
    """Raises ContractError where volumes made with `requested` would not be comparable with those of the store.

    The message names both canonical versions, or every field that differs.
    """
    if canonical_version != CANONICAL_VERSION:
        raise ContractError(
            f"the store {location} was made by canonicalisation {canonical_version}, this octjepa makes "
            f"{CANONICAL_VERSION}: volumes of both would not be comparable; ingest into a new --store folder"
        )
    if science_hash(preprocessing) == science_hash(requested):
        return
    ours, requested_values = preprocessing.model_dump(mode="json"), requested.model_dump(mode="json")
    differing = "\n".join(
        f"  preprocessing.{key}: store {ours[key]}, expected {requested_values[key]}"
        for key in ours
        if ours[key] != requested_values[key]
    )
    raise ContractError(
        f"the store {location} was made with another preprocessing contract:\n{differing}\n"
        "name another --store folder for these settings, or use a recipe with the store's"
    )
