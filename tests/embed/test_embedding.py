"""The embedding table of a store: every eye once, keyed, the same whoever computes it, next to what knows nothing."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import scipy.linalg
import torch
from safetensors.torch import save_file

from narrow_encoder import SIZE
from octjepa.checkpoint.folder import write_folder
from octjepa.embed import embedding, shard, token_folder
from octjepa.embed.embedding import Division, embed_store
from octjepa.embed.shard import intensity_histogram
from octjepa.embed.table import Embeddings, read_embeddings
from octjepa.embed.token_folder import TokenFolder
from octjepa.encoders import PretrainedEncoder, load_encoder, pooling
from octjepa.encoders.locate import current_checkpoint
from octjepa.errors import ContractError, OctjepaError, UsageError, WrongCheckpointError
from octjepa.evaluate.probe import run_probes
from octjepa.model import VJEPA3D
from synthetic import MemoryStore, small_recipe
from worker_tasks import embed_after_a_kill

WIDTH = SIZE["width"]


def weights_file(path: Path, trained_on: list[str], seed: int = 7) -> Path:
    """An encoder whose weights are not those of its recipe's seed, and the volumes it names as trained on."""
    recipe = small_recipe()
    torch.manual_seed(seed)
    weights = VJEPA3D.from_recipe(recipe).target_encoder.state_dict()
    about = {"schema": 1, "recipe": recipe.model_dump(mode="json"), "trained_on": trained_on}
    tensors = {f"target_encoder.{name}": value for name, value in weights.items()}
    save_file(tensors, path, {"octjepa": json.dumps(about)})
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Weights that saw the training volumes of `store_of()`."""
    return weights_file(tmp_path_factory.mktemp("weights") / "e.safetensors", [f"volume{n:04d}" for n in range(12)])


def store_of():
    return MemoryStore(small_recipe().preprocessing)


def same_bits(one: Embeddings, other: Embeddings) -> bool:
    blocks = ("vector", "untrained", "histogram")
    return one.frame.equals(other.frame) and all((getattr(one, b) == getattr(other, b)).all() for b in blocks)


def test_every_raster_volume_once_with_its_keys(run, tmp_path, caplog):
    store = store_of()
    store.table.loc[2, "pattern"] = "radial"
    store.table.loc[3, ["pattern", "device"]] = ["radial", "maestro2"]
    store.participants = pd.DataFrame({"person_id": ["1000", "1001"], "age": [61, 70], "clinical_site": ["UW", "UAB"]})
    with caplog.at_level(logging.WARNING):
        figures = embed_store(run, store, tmp_path / "e.parquet")
    assert "device maestro2 is lost: none of its 1 volumes is raster" in caplog.text
    assert (figures.rows, figures.missing, figures.dim) == (18, 2, WIDTH)
    table = read_embeddings(tmp_path / "e.parquet")
    assert table.pools == pooling.DEFAULT_POOLS == ("mean_std_max", "zones_whitened")
    assert table.vector.shape == table.untrained.shape == (18, (3 + 48) * WIDTH)
    keyed = table.frame.set_index("volume_id")
    assert keyed.loc["volume0001", ["person_id", "content_hash", "split", "age", "clinical_site"]].tolist() == [
        "1001",
        "hash-volume0001",
        "train",
        70.0,
        "UAB",
    ]
    assert keyed.loc["volume0001", "quality"] == 0.8
    assert np.isnan(keyed.loc["volume0005", "age"])
    assert keyed.loc["volume0005", "clinical_site"] == ""
    assert "volume0002" not in keyed.index
    assert [path.name for path in tmp_path.iterdir()] == ["e.parquet"]


@pytest.mark.slow
def test_one_thread_gives_the_same_bits_for_any_batch_and_any_parts(run, tmp_path):
    """Two threads add in another order: nearly the same."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        embed_store(run, store_of(), tmp_path / "a.parquet", division=Division(batch=1))
        embed_store(run, store_of(), tmp_path / "b.parquet", division=Division(batch=7, part=9))
        torch.set_num_threads(2)
        embed_store(run, store_of(), tmp_path / "c.parquet", division=Division(batch=7))
    finally:
        torch.set_num_threads(before)
    a, b, c = (read_embeddings(tmp_path / f"{name}.parquet") for name in "abc")
    assert a.frame["volume_id"].tolist() == sorted(a.frame["volume_id"])
    assert same_bits(a, b)
    assert np.abs(a.vector - c.vector).max() < 1e-5


def test_the_rows_are_what_the_encoder_says_of_each_volume(run, tmp_path):
    """Poolings against their definitions, on the tokens themselves."""
    store, encoder = store_of(), load_encoder(run)
    pools = ("layers", "mean_std_max_min", "tissue_mean", "zones", "zones_centered", "zones_whitened")
    figures = embed_store(
        run, store, tmp_path / "e.parquet", pools, tmp_path / "tokens", per_bscan=True, division=Division(part=8)
    )
    table, saved = read_embeddings(tmp_path / "e.parquet"), TokenFolder.open(figures.tokens)
    volume = store.read("volume0006")
    one, row = encoder.tokens(volume), 6
    assert table.pools == pools
    assert np.allclose(table.features("vector", "mean")[row], one.features.mean(axis=0), atol=1e-6)
    assert np.allclose(table.features("vector", "mean_std_max")[row], encoder.embed(volume, "mean_std_max"), atol=1e-6)
    four = table.features("vector", "mean_std_max_min")[row]
    assert np.allclose(four[: 3 * WIDTH], encoder.embed(volume, "mean_std_max"), atol=1e-6)
    assert np.allclose(four[3 * WIDTH :], one.features.min(axis=0), atol=1e-6)
    weighted = (one.features * one.tissue[:, None]).sum(axis=0) / one.tissue.sum()
    assert np.allclose(table.features("vector", "tissue_mean")[row], weighted, atol=1e-5)
    layers = pooling.tissue_layers(volume, encoder.recipe)[one.grid_index]
    inner = one.features[layers == 1].mean(axis=0)
    assert (layers == 1).any()
    assert np.allclose(table.features("vector", "layers")[row][WIDTH : 2 * WIDTH], inner, atol=1e-6)
    by_zone = table.features("vector", "zones")[row].reshape(16, 2, WIDTH)
    zones = pooling.token_regions(one.grid_index, one.grid)
    for zone in range(16):
        some = one.features[zones == zone]
        expected = [some.mean(axis=0), some.max(axis=0)] if len(some) else np.zeros((2, WIDTH))
        assert np.allclose(by_zone[zone], expected, atol=1e-6)
    assert 1 < len(set(zones.tolist())) < 16  # some hold tissue, and some none
    depth, centered = np.unravel_index(one.grid_index, one.grid)[1], one.features.astype(float)
    for at in set(depth.tolist()):
        centered[depth == at] -= one.features[depth == at].mean(axis=0, dtype=float)
    covariance = centered.T @ centered / len(centered)
    shrunk = (covariance + np.trace(covariance) / WIDTH * np.eye(WIDTH)) / 2
    white = centered @ np.linalg.inv(scipy.linalg.sqrtm(shrunk).real)
    for pool, tokens in (("zones_centered", centered), ("zones_whitened", white)):
        by_zone = table.features("vector", pool)[row].reshape(16, 3, WIDTH)
        for zone in range(16):
            some = tokens[zones == zone]
            three = [some.mean(axis=0), some.max(axis=0), some.min(axis=0)] if len(some) else np.zeros((3, WIDTH))
            assert np.allclose(by_zone[zone], three, atol=1e-4)
    with pytest.raises(
        UsageError, match="mean_std_max_min, tissue_mean, layers, zones, zones_centered, zones_whitened"
    ):
        table.features("vector", "sum")

    assert saved.weights == table.weights == encoder.weights_hash()
    assert np.abs(saved.features("vector", "volume0006") - one.features).max() < 4e-3
    part, own = saved.index["volume0006"]
    assert (saved.positions[part][own] == one.grid_index).all()
    assert table.tokens == "tissue"
    assert figures.tokens_per_volume == {"least": 32, "median": 32, "most": 32}
    with pytest.raises(UsageError, match="no tokens of 1 of the 1"):
        saved.read("vector", ["nobody"])

    slices = pq.read_table(figures.bscans).to_pandas()
    assert len(slices) == 20 * 2
    first = slices[(slices["volume_id"] == "volume0006") & (slices["slice"] == 0)].iloc[0]
    here = one.grid_index < 16
    assert (first["first_bscan"], first["last_bscan"], first["tokens"]) == (0, 3, here.sum())
    assert first["offset_mm"] == pytest.approx(-2 * 0.4)
    assert np.allclose(first["vector"], one.features[here].mean(axis=0), atol=1e-5)


@pytest.fixture
def killed_after_two(monkeypatch):
    """Within, the third part of an embedding is the last thing its process does."""
    done: list[int] = []
    write = shard.Embedder.write

    def killed(self, job, number, *rest):
        if len(done) == 2:
            raise KeyboardInterrupt
        write(self, job, number, *rest)
        done.append(number)

    monkeypatch.setattr(shard.Embedder, "write", killed)
    return lambda: monkeypatch.setattr(shard.Embedder, "write", write)


@pytest.mark.slow
def test_a_killed_embedding_goes_on_where_it_was(run, tmp_path, killed_after_two):
    tokens = tmp_path / "tokens"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            embed_store(run, store_of(), tmp_path / "e.parquet", tokens=tokens, division=Division(part=4))
        assert not (tmp_path / "e.parquet").exists()
    with pytest.raises(UsageError, match="let it end"):
        TokenFolder.open(tokens)
    killed_after_two()
    figures = embed_store(run, store_of(), tmp_path / "e.parquet", tokens=tokens, division=Division(part=4))
    assert figures.resumed == 8
    embed_store(run, store_of(), tmp_path / "whole.parquet", division=Division(part=4))
    assert same_bits(read_embeddings(tmp_path / "e.parquet"), read_embeddings(tmp_path / "whole.parquet"))
    assert sorted(TokenFolder.open(tokens).index) == sorted(store_of().volumes)
    assert not list(tmp_path.glob(".*parts"))


@pytest.mark.slow
@pytest.mark.parametrize("column", ["content_hash", "chunk_hash"])  # of the file, and of the voxels that ingest stored
def test_nothing_of_other_contents_or_options_is_taken_for_done(run, tmp_path, killed_after_two, column):
    tokens = tmp_path / "tokens"
    with pytest.raises(KeyboardInterrupt):
        embed_store(run, store_of(), tmp_path / "e.parquet", tokens=tokens, division=Division(part=4))
    killed_after_two()
    changed = store_of()
    changed.table.loc[3, column] = "another"
    (left,) = tmp_path.glob(".*parts")
    saved = {path.name: path.read_bytes() for path in left.iterdir()}
    assert embed_store(run, changed, tmp_path / "e.parquet", tokens=tokens, division=Division(part=4)).resumed == 0
    assert len(list(tokens.glob("*.vector.npy"))) == 5  # those of the first attempt are gone
    left.mkdir()
    for name, content in saved.items():
        (left / name).write_bytes(content)
    assert (
        embed_store(run, store_of(), tmp_path / "e.parquet", ["mean"], tokens, division=Division(part=4)).resumed == 0
    )


def test_a_damaged_part_and_a_folder_in_the_way_are_reported(run, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "_join", lambda *_: [1.0, 1.0, 1.0])
    embed_store(run, store_of(), tmp_path / "e.parquet", division=Division(part=8))
    monkeypatch.undo()
    parts = sorted(tmp_path.glob(".*parts/*.npz"))
    parts[1].write_bytes(parts[1].read_bytes()[:1000])
    with pytest.raises(OctjepaError, match=r"000001\.npz is damaged"):
        embed_store(run, store_of(), tmp_path / "e.parquet", division=Division(part=8))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.docx").touch()
    with pytest.raises(UsageError, match=r"holds thesis\.docx"):
        embed_store(run, store_of(), tmp_path / "e.parquet", tokens=tmp_path / "full")
    with pytest.raises(
        UsageError, match="no pool sum: known are mean, mean_std_max, mean_std_max_min, tissue_mean, layers, zones"
    ):
        embed_store(run, store_of(), tmp_path / "e.parquet", pools=["sum"])


def test_arrays_of_the_user_in_the_folder_of_tokens_stay(run, tmp_path):
    own_folder, tokens = tmp_path / "own", tmp_path / "tokens"
    own_folder.mkdir()
    np.save(own_folder / "hand_labels.npy", np.arange(5))
    with pytest.raises(UsageError, match=r"holds hand_labels\.npy"):
        embed_store(run, store_of(), tmp_path / "e.parquet", ["mean"], own_folder)
    assert [path.name for path in own_folder.iterdir()] == ["hand_labels.npy"]
    embed_store(run, store_of(), tmp_path / "e.parquet", ["mean"], tokens)
    before = {path.name for path in tokens.glob("*.npy")}
    for name in ("hand_labels.npy", ".hand_labels.npy.tmp"):  # put there while another embedding ran
        (tokens / name).touch()
    token_folder.write_index(tokens, {}, {})
    assert len(before) == 4
    left = {path.name for path in tokens.iterdir()}
    assert {"hand_labels.npy", ".hand_labels.npy.tmp"} <= left
    assert not before & left


def test_missing_parts_of_other_processes_are_waited_for_and_then_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "_STALLED_SECONDS", 0.0)
    monkeypatch.setattr(shard.Embedder, "write", lambda *_: None)
    with pytest.raises(OctjepaError, match="5 of 5 are missing: do all machines see"):
        embed_store(run, store_of(), tmp_path / "e.parquet", division=Division(part=4))


RANK = """
import sys; from pathlib import Path
from octjepa.embed.embedding import Division, embed_store
from synthetic import MemoryStore, small_recipe
store = MemoryStore(small_recipe().preprocessing)
figures = embed_store(sys.argv[1], store, Path(sys.argv[2]), division=Division(part=3, batch=2))
assert figures.rows == 20
"""


@pytest.mark.slow
def test_two_processes_of_torchrun_write_one_table(run, tmp_path, root, monkeypatch):
    embed_store(run, store_of(), tmp_path / "one.parquet")
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", f"{root / 'src'}:{root / 'tests' / 'support'}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, str(tmp_path / "rank.py"), str(run), str(tmp_path / "two.parquet")], check=True)
    one, two = read_embeddings(tmp_path / "one.parquet"), read_embeddings(tmp_path / "two.parquet")
    assert one.frame.equals(two.frame)
    assert np.abs(one.vector - two.vector).max() < 1e-5
    assert (one.histogram == two.histogram).all()


def test_trained_and_untrained_rows_differ(run, tmp_path):
    embed_store(run, store_of(), tmp_path / "e.parquet")
    table = read_embeddings(tmp_path / "e.parquet")
    assert not np.allclose(table.vector, table.untrained, atol=1e-3)


def test_the_histogram_is_of_tissue_alone(run):
    encoder, store = load_encoder(run), store_of()
    volume = store.read("volume0000")
    shares = intensity_histogram(volume, encoder.recipe.preprocessing)
    assert shares.sum() == pytest.approx(1.0)
    assert shares[: 60 // 8].sum() < 0.1  # the dark vitreous is outside the band


def test_intensity_is_the_intensity_of_the_encoders_own_patches_by_zone(run, tmp_path):
    store, encoder = store_of(), load_encoder(run)
    embed_store(run, store, tmp_path / "e.parquet")
    table, chosen = read_embeddings(tmp_path / "e.parquet"), encoder.select_tokens(store.read("volume0006"))
    intensity = table.features("intensity", "none")[6].reshape(16, 3, 4)  # zone; mean, maximum, minimum of its patches
    patches, depth = chosen.patches, np.unravel_index(chosen.grid_index, chosen.grid)[1]
    four = np.stack([patches.mean(axis=1), patches.std(axis=1), *np.percentile(patches, (5, 95), axis=1)], axis=1)
    centered = np.stack([one - four[depth == at].mean(axis=0) for one, at in zip(four, depth, strict=True)])
    zones = pooling.token_regions(chosen.grid_index, chosen.grid)
    zone = int(zones[0])
    some = pooling.whitened(centered)[zones == zone]
    assert np.allclose(intensity[zone], [some.mean(axis=0), some.max(axis=0), some.min(axis=0)], atol=1e-4)
    assert table.unpooled == ("histogram", "intensity")
    part = table.take([6, 3])
    assert (part.intensity == table.intensity[[6, 3]]).all()


@pytest.mark.slow
def test_people_seen_in_pretraining_cannot_be_tested_on(run, tmp_path, caplog):
    store = store_of()
    assert embed_store(run, store, tmp_path / "e.parquet").leaked == 0
    store.table.loc[store.table["person_id"].isin(["1000", "1003"]), "split"] = "test"
    # the fellow eye of a person whose other eye was trained on, and a copy of a scan under another person's name
    store.table.loc[14, ["person_id", "split"]] = ["1005", "test"]
    store.table.loc[15, ["content_hash", "split"]] = ["hash-volume0002", "test"]
    assert embed_store(run, store, tmp_path / "e.parquet").leaked == 4
    assert "pretrained on eyes of people who are now in val or test (4 of them)" in caplog.text
    labels = tmp_path / "labels.tsv"
    labels.write_text("person_id\tsick\n" + "".join(f"{1000 + n}\t{n % 2}\n" for n in range(20)))
    store.table.loc[14, "person_id"] = "1014"
    store.table.loc[15, "content_hash"] = "hash-volume0015"
    embed_store(run, store, tmp_path / "e.parquet")
    with pytest.raises(UsageError, match="pretrained on eyes of 2 people"):
        run_probes([read_embeddings(tmp_path / "e.parquet")], labels, ["sick"])


def test_another_contract_is_refused_by_field(run, tmp_path):
    store = store_of()
    store.preprocessing = store.preprocessing.model_copy(update={"flatten": "plane"})
    with pytest.raises(ContractError, match="flatten: store plane, recipe quadratic"):
        embed_store(run, store, tmp_path / "e.parquet")
    assert not (tmp_path / "e.parquet").exists()


def test_a_checkpoint_of_another_task_is_refused(tmp_path):
    about = {"octjepa": json.dumps({"schema": 1, "recipe": small_recipe().model_dump(mode="json")})}
    save_file({"head.weight": torch.zeros(2, WIDTH)}, tmp_path / "head.safetensors", about)
    with pytest.raises(
        WrongCheckpointError, match=r"head\.safetensors holds other weights, no pretrained encoder: give"
    ):
        embed_store(tmp_path / "head.safetensors", store_of(), tmp_path / "e.parquet")
    tensors = {"head.safetensors": {"weights": torch.zeros(2, WIDTH)}}
    step = write_folder(tmp_path / "head", 3, tensors, {"kind": "segmentation head", "trained_on": []})
    with pytest.raises(WrongCheckpointError, match="is a segmentation head, no pretrained encoder") as raised:
        embed_store(step, store_of(), tmp_path / "e.parquet")
    assert raised.value.exit_code == 2


def test_a_store_without_raster_volumes_is_refused(run, tmp_path):
    store = store_of()
    store.table["pattern"] = "radial"
    with pytest.raises(UsageError, match="no raster volume"):
        embed_store(run, store, tmp_path / "e.parquet")


def test_the_true_cause_of_a_worker_of_ray_is_reported() -> None:
    from octjepa.embed.ray_tasks import task_result

    class TaskError(Exception):
        def __init__(self, cause: Exception | None) -> None:
            super().__init__("a task of Ray failed")
            self.cause = cause

    def findings(cause: Exception | None) -> Exception:
        def get(reference: object) -> None:
            raise TaskError(cause)

        ray = SimpleNamespace(get=get, exceptions=SimpleNamespace(RayTaskError=TaskError, RayError=KeyboardInterrupt))
        with pytest.raises(Exception) as error:  # noqa: PT011
            task_result(ray, None)
        return error.value

    foreign = findings(ZeroDivisionError("division by zero\nand more"))
    assert isinstance(foreign, OctjepaError)
    assert "failed with ZeroDivisionError: division by zero. What was finished is kept" in str(foreign)
    assert "--engine local; if that works, is octjepa" in str(foreign)
    assert "failed with TaskError: a task of Ray failed" in str(findings(None))
    ours = ContractError("the store was prepared otherwise")
    assert findings(ours) is ours


def test_workers_of_ray_open_the_checkpoint_that_was_the_newest_at_the_start(tmp_path, monkeypatch):
    from octjepa.embed import ray_tasks

    recipe, jobs = small_recipe(), []
    about = {"recipe": recipe.model_dump(mode="json"), "trained_on": []}
    for update in (1, 2):
        torch.manual_seed(update)
        state = VJEPA3D.from_recipe(recipe).target_encoder.state_dict()
        tensors = {f"target_encoder.{name}": value for name, value in state.items()}
        step = write_folder(tmp_path / "steps", update, {"model.safetensors": tensors}, about)

    def stopped(job, *_):
        jobs.append(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_tasks, "embed_on_ray", stopped)
    monkeypatch.setattr(ray_tasks.Store, "open", lambda _: store_of())
    monkeypatch.setattr(ray_tasks, "_worker_state", None)
    with pytest.raises(KeyboardInterrupt):
        embed_store(tmp_path / "steps", store_of(), tmp_path / "e.parquet", ["mean"], division=Division(engine="ray"))
    (job,) = jobs
    assert job.checkpoint == str(step)
    assert ray_tasks.embed_on_machine((0, ["volume0001"]), job) == (0, "")
    monkeypatch.setattr(ray_tasks, "_worker_state", None)
    other = replace(job, checkpoint=str(tmp_path / "steps" / "step-00000001"))
    with pytest.raises(OctjepaError, match="changed after the embedding began: run the same command again"):
        ray_tasks.embed_on_machine((0, ["volume0001"]), other)
    for name in ("phantom-tiny", tmp_path / "e.safetensors"):  # no run
        assert current_checkpoint(name) == name


@pytest.mark.parametrize("size", [7e4, np.nan])
def test_tokens_beyond_half_precision_are_an_error(run, tmp_path, monkeypatch, size):
    encode = PretrainedEncoder.encode_tokens

    def large(encoder, selected):
        tokens = encode(encoder, selected)
        tokens[0].features[0, 0] = size
        return tokens

    monkeypatch.setattr(PretrainedEncoder, "encode_tokens", large)
    with pytest.raises(OctjepaError, match=re.escape(f"a token of volume volume0000 has a feature of size {size:.3g}")):
        embed_store(run, store_of(), tmp_path / "e.parquet", ["mean"], tmp_path / "tokens")


@pytest.mark.slow
def test_workers_of_ray_write_the_same_table(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undisturbed, and when a worker is killed in the middle of the table."""
    pytest.importorskip("ray")
    from octjepa.embed import ray_tasks
    from octjepa.ingest import build_store
    from octjepa.ingest.ray_pool import cluster
    from octjepa.phantom import write_cohort
    from octjepa.store import Store

    recipe = small_recipe()
    write_cohort(tmp_path / "phantom", 3, 0, ("topcon_triton",), "small", (0.4, 0.3, 0.3))
    build_store([tmp_path / "phantom"], tmp_path / "store", recipe.preprocessing, 1, 0.0)
    step = weights_file(tmp_path / "e.safetensors", [])
    store = Store.open(tmp_path / "store")
    embed_store(step, store, tmp_path / "here.parquet", tokens=tmp_path / "here", division=Division(part=2))
    here = read_embeddings(tmp_path / "here.parquet")
    ids = here.frame["volume_id"].tolist()
    ours = TokenFolder.open(tmp_path / "here").read("vector", ids)
    monkeypatch.setenv("PYTHONPATH", f"{root / 'src'}:{root / 'tests' / 'support'}")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    by_ray = Division(engine="ray", part=2)
    with cluster(1):
        for name in ("ray", "disturbed"):
            embed_store(step, store, tmp_path / f"{name}.parquet", tokens=tmp_path / name, division=by_ray)
            assert (tmp_path / "killed").exists() == (name == "disturbed")
            ray = read_embeddings(tmp_path / f"{name}.parquet")
            assert here.frame.equals(ray.frame)
            assert np.abs(here.vector - ray.vector).max() < 1e-5
            theirs = TokenFolder.open(tmp_path / name).read("vector", ids)
            assert np.abs(ours.features.astype(float) - theirs.features).max() < 4e-3
            assert np.array_equal(ours.coordinates, theirs.coordinates)
            monkeypatch.setattr(ray_tasks, "embed_on_machine", embed_after_a_kill)
