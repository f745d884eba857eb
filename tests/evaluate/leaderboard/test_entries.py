"""From what a user names to features: runs opened to checkpoints, seeds by name, encoders of others, stored tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import call
from invented_cohort import board_with
from octjepa.encoders.export import export
from octjepa.encoders.pretrained import load_encoder
from octjepa.errors import CheckpointError, UsageError
from octjepa.evaluate.leaderboard.entries import embed_entries, read_entries
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints."""
    recipe = small_recipe(checkpoint={"every_updates": 2}, tracking={"pictures_every_updates": None})
    out = tmp_path_factory.mktemp("board") / "run"
    pretrain(recipe, MemoryStore(recipe.preprocessing, train=24, val=8), out)
    return out


@pytest.fixture
def store() -> MemoryStore:
    """24 people to train, 8 to validate, 10 to test, who stand in no run."""
    store = MemoryStore(small_recipe().preprocessing, train=24, val=18)
    store.table.loc[store.table.index[-10:], "split"] = "test"
    return store


@pytest.fixture
def labels(tmp_path: Path, store: MemoryStore) -> Path:
    """Sick are the eyes that are brightest, as every encoder can see."""
    rows = [f"{person}\t{int(number % 3 == 2)}\n" for number, person in enumerate(store.table["person_id"])]
    (tmp_path / "labels.tsv").write_text("person_id\tsick\n" + "".join(rows))
    return tmp_path / "labels.tsv"


@pytest.mark.slow
def test_a_run_is_opened_to_its_checkpoints_and_a_checkpoint_is_one(run: Path, tmp_path: Path) -> None:
    steps = sorted((run / "checkpoints").glob("step-*"))
    export(run, "safetensors", tmp_path / "out")
    whole, one, file, other = read_entries([str(run), str(steps[0]), str(tmp_path / "out"), "mine=" + str(steps[1])])
    assert [candidate.label for candidate in whole.candidates] == [step.name for step in steps]
    assert len(steps) == 2
    assert [len(entry.candidates) for entry in (one, file, other)] == [1, 1, 1]
    assert [entry.name for entry in (whole, one, file, other)] == ["run", f"run-{steps[0].name}", "out", "mine"]


def test_one_given_name_is_one_objective_and_one_found_name_is_not(run: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "eyes.parquet").write_bytes(b"")
    paths = [str(tmp_path / folder / "eyes.parquet") for folder in ("a", "b")]
    assert [(one.name, one.seed) for one in read_entries([f"x={path}" for path in paths])] == [("x", 1), ("x", 2)]
    assert [(one.name, one.seed) for one in read_entries(paths)] == [("eyes", 1), ("eyes#2", 1)]
    with pytest.raises(UsageError, match="given twice: one training cannot count as two"):
        read_entries([f"x={paths[0]}", f"x={tmp_path}/b/../a/eyes.parquet"])
    with pytest.raises(UsageError, match="is not an entry"):
        read_entries(["=x"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        read_entries([str(tmp_path / "empty")])


@pytest.mark.parametrize("reverse", [False, True])
def test_a_name_from_a_path_is_not_a_seed_of_an_equal_stated_name(tmp_path: Path, reverse: bool) -> None:
    for name in ("first", "other", "third"):
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    texts = [f"{tmp_path}/first.parquet", f"first={tmp_path}/other.parquet", f"first={tmp_path}/third.parquet"]
    entries = read_entries(texts[::-1] if reverse else texts)
    seeds = {Path(entry.candidates[0].source).stem: (entry.name, entry.seed) for entry in entries}
    assert seeds.pop("first") == ("first#2", 1)
    assert sorted(seeds.values()) == [("first", 1), ("first", 2)]


@pytest.mark.slow
def test_runs_and_encoders_of_others_stand_on_one_board(
    run: Path, store: MemoryStore, labels: Path, tmp_path: Path
) -> None:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=16
    )
    ViTModel(config).save_pretrained(tmp_path / "vit")
    board = board_with(
        [str(run), str(tmp_path / "vit")], labels, ["sick"], store, tmp_path / "kept", reference="vit", bootstrap=100
    )
    names = [row["name"] for row in board.rows if row["primary"]]
    assert names == ["run", "vit", "untrained", "untrained:vit", "histogram", "intensity", "covariates", "majority"]
    assert {one["option"].split()[0] for one in board.choices if one["name"] == "run"} == {
        *("step-00000002", "step-00000004")
    }
    assert board.trainings[0]["checkpoint"] in ("step-00000002", "step-00000004")
    assert [row["name"] for row in board.comparisons] == ["run"]
    assert any("vit: its files do not say what it was pretrained on" in note for note in board.notes)
    (histogram,) = [row for row in board.rows if row["name"] == "histogram" and row["primary"]]
    assert histogram["value"] > 0.9
    vectors = {
        one.entry.name: one.table.vector for one in embed_entries(read_entries([str(run)]), store, tmp_path / "kept")
    }
    expected = load_encoder(run).embed(store.read("volume0000"), "mean_std_max")
    assert np.allclose(vectors["run"][0][: len(expected)], expected, atol=1e-4)


@pytest.mark.slow
def test_the_same_weights_are_not_two_seeds(run: Path, store: MemoryStore, tmp_path: Path) -> None:
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    with pytest.raises(UsageError, match="of ours have the same weights: one training cannot count as two"):
        embed_entries(read_entries([f"ours={run}", f"ours={last}"]), store, tmp_path)


@pytest.mark.slow
def test_tables_are_retained_until_the_store_changes(
    run: Path, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = read_entries([str(run)])
    first = embed_entries(entries, store, tmp_path)
    assert len(list(tmp_path.glob("*.parquet"))) == 2
    reads: list[str] = []
    read = MemoryStore.read
    monkeypatch.setattr(MemoryStore, "read", lambda self, name: reads.append(name) or read(self, name))
    again = embed_entries(entries, store, tmp_path)
    assert reads == []
    assert np.array_equal(first[1].table.vector, again[1].table.vector)
    store.table.loc[40, "split"] = "val"
    changed = embed_entries(entries, store, tmp_path)
    assert changed[0].table.frame.set_index("volume_id").loc["volume0040", "split"] == "val"
    assert len(reads) == 2 * 42


@pytest.mark.slow
def test_what_a_killed_embedding_left_beside_a_whole_table_is_removed(
    run: Path, store: MemoryStore, tmp_path: Path
) -> None:
    entries = read_entries([str(run)])
    embed_entries(entries, store, tmp_path)
    whole = sorted(tmp_path.iterdir())
    for table in whole:
        (tmp_path / f".{table.name}.lock").touch()
        (tmp_path / f".{table.name}.0123456789ab.parts").mkdir()
    embed_entries(entries, store, tmp_path)
    assert sorted(tmp_path.iterdir()) == whole


def test_labels_that_fit_nothing_are_reported_before_anything_is_embedded(
    run: Path, store: MemoryStore, labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryStore, "read", lambda self, name: pytest.fail("a volume was read"))
    text = labels.read_text().replace("\t1\n", "\t0\n")
    labels.write_text(text)
    with pytest.raises(UsageError, match="have the same value"):
        board_with([str(run)], labels, ["sick"], store, tmp_path / "kept", bootstrap=50)


@pytest.mark.slow
def test_what_pretraining_saw_is_left_out(run: Path, store: MemoryStore, labels: Path, tmp_path: Path) -> None:
    store.table.loc[[0, 1], "split"] = "test"
    with pytest.raises(UsageError, match="pretrained on eyes of 2 people"):
        board_with([str(run)], labels, ["sick"], store, tmp_path / "kept", bootstrap=50)


@pytest.mark.slow
def test_the_verb_says_what_the_contract_names(made: Any, tmp_path: Path) -> None:
    table, labels, _ = made
    words = ["leaderboard", table("good", 2.5), table("poor", 0.0), "--labels", labels, "--target", "lesion0"]
    result = call(*words, "--out", tmp_path / "board", "--json", "--quiet")
    assert result.code == 0, result.err
    keys = {"name", "target", "probe", "pool", "metric", "value", "low", "high", "n"}
    assert all(keys <= row.keys() for row in result.json["rows"])
    assert all(Path(file).is_file() for file in result.json["files"])
    text = call(*words, "--out", tmp_path / "board", "--reference", "poor", "--probe", "linear")
    assert "test_used_before" in text.out or "2nd time" in text.out
    assert "good" in text.out
    assert "Traceback" not in text.err
    absent = [*words[:3], "--target", "lesion0", "--labels", tmp_path / "absent.tsv", "--out", tmp_path / "board"]
    assert call(*absent).code == 2
    (tmp_path / "file").write_text("")
    assert call(*words, "--out", tmp_path / "file").code == 2
    assert call(*words, "--reference", "nobody", "--out", tmp_path / "board").code == 2


def test_a_published_encoder_is_an_entry_by_its_name(tmp_path):
    entries = read_entries(["retfound:weights.pth", "own=mirage:m.pth#sha256=ab", f"mirage:{tmp_path}/m.pth#sha256=ab"])
    assert [entry.name for entry in entries] == ["retfound", "own", "mirage"]
    assert entries[1].candidates[0].source == "mirage:m.pth#sha256=ab"
    with pytest.raises(UsageError, match=r"nothing at retfund:w\.pth.*NAME:PATH of another encoder \(.*retfound"):
        read_entries(["retfund:w.pth"])
