"""What another version wrote is read as it was meant, or refused in one line that names both schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from index_entries import index_entry
from octjepa import __version__, load_encoder
from octjepa.checkpoint import folder
from octjepa.checkpoint.state import MODEL_FILE
from octjepa.checkpoint.weights import EXPORTED
from octjepa.config import stored_recipe
from octjepa.embed import table
from octjepa.encoders.export import export
from octjepa.errors import CheckpointError, RecipeError, UsageError
from octjepa.model import VJEPA3D
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from octjepa.store.contract import OLDEST_SCHEMA, SCHEMA_VERSION, contract_text
from octjepa.store.index import COLUMNS, decode_labels, entries_of
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
    without = [
        {name: marker[name] for name in marker if name != key} for key in ("schema_version", "canonical_version")
    ]
    for text in (*map(json.dumps, without), "{", json.dumps({"schema_version": SCHEMA_VERSION})):
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


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """The folder of an exported encoder, with its initial weights."""
    recipe = small_recipe()
    saves = folder.write_folder(
        tmp_path, 1, {MODEL_FILE: VJEPA3D.from_recipe(recipe).state_dict()}, {"recipe": recipe.model_dump(mode="json")}
    )
    export(str(saves), "safetensors", tmp_path / "out")
    return tmp_path / "out"


def rewrite_metadata(file: Path, change: dict[str, Any]) -> None:
    """The file with these entries of octjepa's metadata; None removes one."""
    with safe_open(file, "pt") as weights:
        about = json.loads(weights.metadata()["octjepa"]) | change
    about = {key: value for key, value in about.items() if value is not None}
    save_file(load_file(file), file, {"octjepa": json.dumps(about)})


@pytest.mark.parametrize(
    ("schema", "message"),
    [(folder.SCHEMA + 1, "update octjepa$"), (folder.SCHEMA - 1, "use the octjepa that wrote it .*or train again$")],
)
def test_an_exported_encoder_of_another_schema_names_the_way_out(exported: Path, schema: int, message: str) -> None:
    rewrite_metadata(exported / EXPORTED, {"schema": schema})
    with pytest.raises(CheckpointError, match=rf"has schema {schema}, this octjepa reads {folder.SCHEMA}: {message}"):
        load_encoder(exported)


def test_an_exported_encoder_without_a_schema_is_refused(exported: Path) -> None:
    with safe_open(exported / EXPORTED, "pt") as weights:
        assert json.loads(weights.metadata()["octjepa"])["schema"] == folder.SCHEMA
    rewrite_metadata(exported / EXPORTED, {"schema": None})
    with pytest.raises(CheckpointError, match="is not a weights file of octjepa, or it is damaged"):
        load_encoder(exported)


@pytest.mark.parametrize(
    ("schema", "message"), [(table.SCHEMA + 1, "update octjepa$"), (table.SCHEMA - 1, "run octjepa embed again$")]
)
def test_embeddings_of_another_schema_name_the_way_out(
    tmp_path: Path, cohort: Callable[..., tuple[pd.DataFrame, pd.DataFrame]], schema: int, message: str
) -> None:
    path = table.write_embeddings(tmp_path / "e.parquet", cohort(people=3)[0], table.TableFacts(16, "octjepa", "abc"))
    rewrite_table(path, {b"octjepa.schema": str(schema).encode()})
    with pytest.raises(UsageError, match=rf"has schema {schema}, this octjepa reads {table.SCHEMA}: {message}"):
        table.read_embeddings(path)


@pytest.mark.parametrize("fact", ["schema", "weights", "tokens", "pools", "leaked", "store"])
def test_embeddings_that_do_not_state_a_fact_are_refused(
    tmp_path: Path, cohort: Callable[..., tuple[pd.DataFrame, pd.DataFrame]], fact: str
) -> None:
    path = table.write_embeddings(tmp_path / "e.parquet", cohort(people=3)[0], table.TableFacts(16, "octjepa", "abc"))
    rewrite_table(path, {f"octjepa.{fact}".encode(): None})
    with pytest.raises(UsageError, match=rf"lacks the parquet metadata octjepa\.{fact}: "):
        table.read_embeddings(path)


def rewrite_table(path: Path, change: dict[bytes, bytes | None]) -> None:
    """The parquet file with these entries of its metadata; None removes one."""
    content = pq.read_table(path)
    metadata = {key: value for key, value in ({**content.schema.metadata, **change}).items() if value is not None}
    pq.write_table(content.replace_schema_metadata(metadata), path)


def test_an_index_without_labels_and_hashes_is_read(tmp_path: Path) -> None:
    entry = index_entry(0, provenance_depth="header", uncertain="depth;column", labels="", chunk_hash="")
    pd.DataFrame([entry]).drop(columns=["labels", "chunk_hash"]).to_parquet(tmp_path / "volumes.parquet")
    (tmp_path / "store.json").write_text(contract_text(small_recipe().preprocessing))
    store = Store.open(tmp_path)
    assert list(store.table.columns) == list(COLUMNS)
    (found,) = store.table.to_dict("records")
    assert (found["provenance_depth"], found["uncertain"]) == ("header", "depth;column")
    (read,) = entries_of(store.table)
    assert (read.provenance_depth, decode_labels(read.labels), read.chunk_hash) == ("header", {}, "")


def test_an_index_that_does_not_say_which_personal_data_the_files_hold_is_refused(tmp_path: Path) -> None:
    pd.DataFrame([index_entry(0)]).drop(columns="personal").to_parquet(tmp_path / "volumes.parquet")
    (tmp_path / "store.json").write_text(contract_text(small_recipe().preprocessing))
    with pytest.raises(UsageError, match="column 'personal' is absent"):
        _ = Store.open(tmp_path).table


def test_a_stored_recipe_with_a_key_of_another_version_names_the_way_out() -> None:
    stored = small_recipe().model_dump(mode="json")
    stored["model"]["recurrence"] = 2
    way_out = rf"(?s)model\.recurrence: unknown key.*octjepa {re.escape(__version__)} does not write"
    with pytest.raises(RecipeError, match=way_out):
        stored_recipe(stored, "of the test")


def test_what_is_written_now_is_read_now(tmp_path: Path) -> None:
    """Raise OLDEST_SCHEMA or bring a migration when this fails: stores of the last schema are in use."""
    (tmp_path / "store.json").write_text(contract_text(small_recipe().preprocessing))
    assert Store.open(tmp_path).preprocessing == small_recipe().preprocessing
    assert (OLDEST_SCHEMA, SCHEMA_VERSION, folder.SCHEMA, table.SCHEMA) == (1, 1, 1, 1)
