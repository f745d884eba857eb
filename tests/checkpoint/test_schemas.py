"""A store or checkpoint of another schema ends in one line that names both schemas and the way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octjepa.checkpoint import folder
from octjepa.errors import CheckpointError, UsageError
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from octjepa.store.contract import OLDEST_SCHEMA, SCHEMA_VERSION, contract_text
from synthetic import small_recipe


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (SCHEMA_VERSION + 1, rf"has schema {SCHEMA_VERSION + 1}, this octjepa reads schema 1: update octjepa$"),
        (
            OLDEST_SCHEMA - 1,
            rf"has schema {OLDEST_SCHEMA - 1}, this octjepa reads schema 1: ingest the scans again",
        ),
    ],
)
def test_a_store_of_another_schema_names_the_way_out(tmp_path: Path, schema: int, message: str) -> None:
    preprocessing: Preprocessing = small_recipe().preprocessing
    marker = json.loads(contract_text(preprocessing)) | {"schema_version": schema}
    (tmp_path / "store.json").write_text(json.dumps(marker))
    with pytest.raises(UsageError, match=message) as caught:
        Store.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_store_json_without_schema_or_unreadable_names_the_way_out(tmp_path: Path) -> None:
    marker = json.loads(contract_text(small_recipe().preprocessing))
    del marker["schema_version"]
    for text in (json.dumps(marker), "{", json.dumps({"schema_version": SCHEMA_VERSION})):
        (tmp_path / "store.json").write_text(text)
        with pytest.raises(UsageError, match="ingest the scans again into a new --store folder"):
            Store.open(tmp_path)


@pytest.mark.parametrize(
    ("schema", "message"),
    [(folder.SCHEMA + 1, "update octjepa$"), (folder.SCHEMA - 1, "use the octjepa that wrote it .*or train again$")],
)
def test_a_checkpoint_of_another_schema_names_the_way_out(tmp_path: Path, schema: int, message: str) -> None:
    (tmp_path / folder.MANIFEST).write_text(json.dumps({"schema": schema, "update": 1, "files": {}}))
    with pytest.raises(CheckpointError, match=rf"has schema {schema}, this octjepa reads {folder.SCHEMA}: {message}"):
        folder.read_manifest(tmp_path)


def test_what_is_written_now_is_read_now(tmp_path: Path) -> None:
    """Raise OLDEST_SCHEMA or bring a migration when this fails: stores of the last schema are in use."""
    (tmp_path / "store.json").write_text(contract_text(small_recipe().preprocessing))
    assert Store.open(tmp_path).preprocessing == small_recipe().preprocessing
    assert (OLDEST_SCHEMA, SCHEMA_VERSION, folder.SCHEMA) == (1, 1, 1)
