"""Encoders of others next to each other on one board, narrow and with random weights in their published layouts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from invented_cohort import board_with
from octjepa.evaluate.leaderboard.entries import embed_entries, read_entries
from synthetic import MemoryStore, small_recipe

NAMES = ("retfound", "visionfm", "dinov2", "mirage", "octcube")
CODE = """
from dataclasses import replace
from octjepa.encoders.external.published import PUBLISHED

IMAGES = {"mirage": (64, 64), "octcube": (6, 32, 32), "dinov2": (28, 28)}
for name in ("retfound", "visionfm", "dinov2", "mirage", "octcube"):
    narrow = replace(PUBLISHED[name], sizes={16: (2, 2)}, image=IMAGES.get(name, (32, 32)))
    globals()[name] = narrow.load
"""


@pytest.mark.slow
def test_five_encoders_of_others_stand_on_one_board(layouts, install_package, tmp_path):
    install_package("narrow", "octjepa.encoders", "\n".join(f"narrow_{n} = narrow:{n}" for n in NAMES), CODE)
    store = MemoryStore(small_recipe().preprocessing, train=24, val=18)
    store.table.loc[store.table.index[-10:], "split"] = "test"
    rows = [f"{person}\t{int(number % 3 == 2)}\n" for number, person in enumerate(store.table["person_id"])]
    (tmp_path / "labels.tsv").write_text("person_id\tsick\n" + "".join(rows))
    for name in NAMES:
        torch.save(layouts[name](), tmp_path / f"{name}.pth")
    entries = [f"{name}=narrow_{name}:{tmp_path / name}.pth" for name in NAMES]
    board = board_with(
        entries, tmp_path / "labels.tsv", ["sick"], store, tmp_path / "tables", reference="retfound", bootstrap=100
    )
    primary = {row["name"]: row for row in board.rows if row["primary"]}
    assert set(NAMES) <= set(primary)
    assert {f"untrained:{name}" for name in NAMES} <= set(primary) or "untrained" in primary
    assert all(np.isfinite(primary[name]["value"]) for name in NAMES)
    assert {row["name"] for row in board.comparisons} == set(NAMES) - {"retfound"}
    for name in NAMES:
        assert any(note.startswith(f"{name}: encoder ") and "sha256" in note for note in board.notes)


def test_their_tokens_are_stored_for_the_attentive_probe(layouts, install_package, tmp_path):
    install_package("narrow", "octjepa.encoders", "narrow_octcube = narrow:octcube", CODE)
    store = MemoryStore(small_recipe().preprocessing, train=2, val=2)
    torch.save(layouts["octcube"](), tmp_path / "octcube.pth")
    entries = read_entries([f"narrow_octcube:{tmp_path / 'octcube.pth'}"])
    (one,) = embed_entries(entries, store, tmp_path / "tables", with_tokens=True)
    assert one.tokens is not None
    assert one.tokens.grid == (2, 2, 2)
    ids = one.table.frame["volume_id"].tolist()
    means = one.tokens.read("vector", ids).features.astype(np.float32).mean(axis=1)  # [volumes, dim]
    assert np.allclose(means, one.table.features("vector", "mean"), atol=2e-3)
    (table,) = (tmp_path / "tables").glob("*.parquet")
    written = table.stat().st_mtime_ns
    embed_entries(entries, store, tmp_path / "tables", with_tokens=True)
    assert table.stat().st_mtime_ns == written


def test_a_table_of_other_images_is_not_taken_for_the_same_weights(tmp_path):
    """The preprocessor's mean and spread, and `input_size` of MONAI, change features and not weights."""
    from transformers import ViTConfig, ViTModel

    folder, store = tmp_path / "vit", MemoryStore(small_recipe().preprocessing, train=2, val=2)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTModel(ViTConfig(**shape, image_size=32, patch_size=16)).save_pretrained(folder)
    vectors = []
    for mean in ([0.5, 0.5, 0.5], [0.1, 0.1, 0.1], [0.5, 0.5, 0.5]):
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": mean, "image_std": [1, 1, 1]}))
        (embedded,) = embed_entries(read_entries([str(folder)]), store, tmp_path / "tables")
        vectors.append(embedded.table.vector)
    assert not np.allclose(vectors[0], vectors[1])
    assert np.array_equal(vectors[0], vectors[2])
    assert len(list((tmp_path / "tables").glob("*.parquet"))) == 2  # the third is the first, read again
