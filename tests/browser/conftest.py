"""What the viewer shows in tests in a browser: a store with and without files, a run, predictions and embeddings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from octjepa.embed.table import TableFacts, write_embeddings
from octjepa.files import replace_folder
from octjepa.ingest.build import build_store
from octjepa.ingest.native_files import NativeFiles
from octjepa.phantom import write_cohort
from octjepa.store import Store
from octjepa.store.index import IndexEntry
from octjepa.store.storage import stage_chunk
from octjepa.viewer.live import LiveRun
from octjepa.viewer.misread import CasePredictions
from octjepa.viewer.neighbours import Neighbours
from octjepa.viewer.scans import Scans
from synthetic import volume


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Layers that the viewer finds are kept in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTJEPA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the two eyes of a person whose files are there, one without a file, and the journal of a run."""
    from index_entries import index_entry
    from octjepa import load_encoder

    root = tmp_path_factory.mktemp("browser")
    preprocessing = load_encoder("phantom-tiny").recipe.preprocessing
    write_cohort(root / "eyes", people=1, seed=3, devices=["heidelberg_spectralis"])
    build_store([root / "eyes"], root / "store", preprocessing)
    made = Store.open(root / "store")
    row = index_entry(7, split="val", source="<img src=x onerror=alert(1)>.dcm", quality=np.nan, device="zeiss_cirrus")
    staged = stage_chunk(made.chunk_folder(row["volume_id"]), volume(preprocessing, 7))
    replace_folder(staged, made.chunk_folder(row["volume_id"]))
    made.add(IndexEntry(**row))
    made.consolidate()
    lines = [{"update": u, "train/loss": 1 / u, "train/grad_norm": 1.0 * u} for u in range(1, 9)]
    lines.append({"update": 8, "val/loss": 0.3, "alarms": {"rankme": "<b>low</b>"}})
    table = made.table.assign(age=np.nan, clinical_site="")
    table["histogram"] = table["untrained"] = table["vector"] = [np.eye(3, 12, k, dtype="f4")[0] for k in range(3)]
    write_embeddings(root / "e.parquet", table, TableFacts(4, "ours", "c" * 64))
    case = {"level": "volume", "target": "age", "split": "test", "eye": "OD", "volume_id": row["volume_id"]}
    case |= {"truth": "60.0", "predicted": "40.0", "classes": [], "scores": [40.0]}
    other = case | {"target": "weight", "truth": "90.0", "predicted": "70.0", "scores": [70.0]}
    pd.DataFrame([case, other]).to_parquet(root / "cases.parquet")
    (root / "run").mkdir()
    (root / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


@pytest.fixture(scope="module")
def scans(folder: Path) -> Scans:
    """The volumes of `folder` with an encoder, a run, predictions and embeddings."""
    from octjepa import load_encoder

    encoder = load_encoder("phantom-tiny")
    files, live = NativeFiles([str(folder / "eyes")]), LiveRun(folder / "run")
    store = Store.open(folder / "store")
    people = dict.fromkeys(store.table["volume_id"], 1)
    cases = CasePredictions(folder / "cases.parquet", people)
    neighbours = Neighbours(folder / "e.parquet", people)
    return Scans(store, lambda: (encoder.recipe, encoder, ""), files, None, live, cases, neighbours)
