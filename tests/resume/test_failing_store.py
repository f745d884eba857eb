"""A store that fails: requests that fail by chance change nothing, volumes that are gone are replaced and counted."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from bucket_servers import Bucket, bucket_of, s3_server
from faulty_proxy import Fault
from narrow_encoder import SIZE
from oct_dicom import make_dataset, retina, save
from octjepa.config import PRETRAINING
from octjepa.files import read_json_lines
from octjepa.ingest import build_store
from octjepa.recipe import Recipe
from octjepa.remote import join
from octjepa.store import Store
from octjepa.train.loop import pretrain
from octjepa.views.loader import TrainingDataset, select_volumes
from ranks import BEGIN, assert_same, finish, start_ranks, weights_of

pytestmark = pytest.mark.slow

EYES = 40
UPDATES = 10
SHARE = 0.05


def recipe_of(**machine: Any) -> Recipe:
    return PRETRAINING.read(
        {
            "name": "failing",
            "model": SIZE,
            "data": {"strategy": "multi_domain", "min_quality": None},  # tiny eyes without layers
            "preprocessing": {"image_size": [8, 64, 64], "margin": [0, 4, 4], "target_spacing_mm": [0.4, 0.016, 0.1]},
            "tokens": {"patch_size": [4, 16, 16], "select": "tissue", "budget": 16},
            "train": {"max_updates": UPDATES, "global_batch": 4, "base_lr": 1e-3, "precision": "fp32"},
            "validation": {"max_samples": 2},
            "monitor": {"every_updates": None},
            "machine": {"micro_batch": 2, **machine},
        },
        "of the test",
    )


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scans") / "set"
    for number in range(EYES):
        ds = make_dataset(retina(seed=number))
        ds.PatientID, ds.ImageLaterality = str(1001 + number // 2), "RL"[number % 2]
        save(ds, root / "topcon_maestro2" / f"eye{number}.dcm")
    return root


@pytest.fixture(scope="module")
def healthy(scans: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from a store on disk to which nothing happens, and that store."""
    location = tmp_path_factory.mktemp("healthy")
    build_store([scans], location / "store", recipe_of().preprocessing)
    torch.set_num_threads(1)
    pretrain(recipe_of(), Store.open(location / "store"), location / "run")
    return location


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    with s3_server() as proxy, bucket_of("s3", proxy, tmp_path / "cache", timeout_seconds=20) as location:
        yield location


class ByChance(Fault):
    """Strikes a share of all requests: 503 and reset in turn."""

    def __init__(self) -> None:
        super().__init__("503")
        self._chance, self.struck, self.requests = random.Random(5), 0, 0

    def strikes(self, method: str, path: str) -> bool:
        self.requests += 1
        if self._chance.random() >= SHARE:
            return False
        self.struck += 1
        self.kind = ("503", "reset")[self.struck % 2]
        return True


def test_a_bucket_that_fails_5_per_cent_of_requests_trains_the_same_weights(
    bucket: Bucket, scans: Path, healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_store([scans], join(bucket.url, "store"), recipe_of().preprocessing)
    monkeypatch.setenv("OCTJEPA_REMOTE_TRIES", "8")
    monkeypatch.setenv("OCTJEPA_CACHE_GB", "0.0001")  # a volume or two: every epoch asks the bucket again
    for workers in (0, 1):
        faults = ByChance()
        bucket.proxy.faults[:] = [faults]
        out = tmp_path / f"workers{workers}"
        summary = pretrain(recipe_of(loader_workers=workers), Store.open(join(bucket.url, "store")), out)
        assert summary.updates == UPDATES
        assert faults.requests > 100, "the cache hides the bucket"
        assert faults.struck > 3
        lines = read_json_lines(out / "metrics.jsonl")
        assert 0 < sum(line.get("retried", 0) for line in lines) <= faults.struck
        assert not [line for line in lines if "unread" in line]
        assert_same(weights_of(healthy / "run"), weights_of(out))


TWO = (
    BEGIN
    + """
from octjepa.store import Store
sys.path.append(sys.argv[3])
from test_failing_store import recipe_of
pretrain(recipe_of(), Store.open(sys.argv[2]), out)
"""
)


def test_volumes_that_are_gone_for_good_are_replaced_and_counted_on_any_number_of_ranks(
    healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of()
    shutil.copytree(healthy / "store", tmp_path / "store")
    store = Store.open(tmp_path / "store")
    ids = select_volumes(store, recipe, "train").volume_ids
    gone = set(sorted(ids)[:: round(1 / SHARE)])
    for volume_id in gone:
        chunk = store.chunk_folder(volume_id) / "pixels.npy"
        chunk.write_bytes(chunk.read_bytes()[:1000])
    torch.set_num_threads(1)
    seen: list[tuple[str, ...]] = []
    honest = TrainingDataset.__getitem__
    monkeypatch.setattr(TrainingDataset, "__getitem__", lambda *arguments: noted(honest(*arguments), seen))
    pretrain(recipe, Store.open(tmp_path / "store"), tmp_path / "one")

    order = TrainingDataset(store, recipe, ids).order
    expected = []
    for position in range(4 * UPDATES):
        replacements = (order.volume_at(position, replaced)[1] for replaced in count())
        expected.append(next(volume_id for volume_id in replacements if volume_id not in gone))
    assert seen == expected
    monkeypatch.undo()

    ended = finish(start_ranks(TWO, tmp_path / "two", tmp_path / "store", Path(__file__).parent))
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
    assert_same(weights_of(tmp_path / "one"), weights_of(tmp_path / "two"))
    for run in ("one", "two"):
        lines = read_json_lines(tmp_path / run / "metrics.jsonl")
        assert {name for line in lines for name in line.get("unread", ())} == gone
        rows = [json.loads(line) for line in (tmp_path / run / "quarantine.jsonl").read_text().splitlines()]
        assert sorted(row["file"] for row in rows) == sorted(gone), "each once, whoever met it and however often"
        assert {row["reason"] for row in rows} == {"unreadable_file"}


def noted(item: Any, seen: list[Any]) -> Any:
    seen.append(item.volume_id)
    return item
