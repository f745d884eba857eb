"""Where the attentive probe looks is kept for volumes of val and test, of encoder and twin, and read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from invented_cohort import probe_with
from octjepa.embed import token_folder
from octjepa.embed.table import TableFacts, read_embeddings, write_embeddings
from octjepa.embed.token_folder import TokenFolder
from octjepa.errors import UsageError
from octjepa.evaluate import probe_training
from octjepa.explain import figures
from octjepa.explain.attention import TokenAttention, read_attention, write_attention

Cohort = Callable[..., tuple[pd.DataFrame, pd.DataFrame]]
GRID = (1, 2, 3)


@pytest.fixture
def tokens_of(tmp_path: Path) -> Callable[[pd.DataFrame], TokenFolder]:
    """2 to 6 tokens a volume, in a descending order of positions."""

    def write(frame: pd.DataFrame) -> TokenFolder:
        rng, counts = np.random.default_rng(0), np.arange(len(frame)) % 5 + 2
        features = rng.normal(size=(counts.sum(), 16)).astype(np.float16)
        positions = np.concatenate([np.arange(6)[::-1][:count] for count in counts]).astype(np.int32)
        part = {"vector": features, "untrained": -features, "positions": positions, "counts": counts.astype(np.int32)}
        (tmp_path / "tokens").mkdir()
        token_folder.write_part(tmp_path / "tokens", "a", part)
        about = {"encoder": "octjepa", "weights": "w", "contract": "c" * 64, "dim": 16, "grid": list(GRID)}
        token_folder.write_index(tmp_path / "tokens", {"a": frame["volume_id"].tolist()}, about)
        return TokenFolder.open(tmp_path / "tokens")

    return write


def test_targets_with_names_that_files_cannot_have_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    writer = SimpleNamespace(
        recipe=SimpleNamespace(grid=GRID), write_map=lambda kind, values: written.append(kind), native=None
    )
    monkeypatch.setattr(figures, "_write_attention_figure", lambda *rest: None)
    maps = [
        TokenAttention(target, False, GRID, np.arange(6), np.full(6, 1 / 6, np.float32))
        for target in ("grade>1", "grade<1", "grade>1", "fluid")
    ]
    figures.write_attention_maps(writer, maps)  # type: ignore[arg-type]
    assert written == ["attention.grade_1", "attention.grade_1-2", "attention.grade_1", "attention.fluid"]


@pytest.mark.slow
def test_attention_of_held_out_volumes_is_written_and_read(
    cohort: Cohort, tokens_of: Callable[[pd.DataFrame], TokenFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_training, "EPOCHS", 1)
    frame, labels = cohort(people=60)
    labels.to_csv(tmp_path / "labels.tsv", sep="\t", index=False)
    table = read_embeddings(
        write_embeddings(tmp_path / "e.parquet", frame, TableFacts(16, "octjepa", "c" * 64, weights="w"))
    )
    options = {"probes": ["attentive"], "pools": ["mean"], "bootstrap": 20, "tokens": [tokens_of(frame)]}
    result = probe_with([table], tmp_path / "labels.tsv", ["lesion0"], attention=True, **options)
    held_out = frame[frame["split"] != "train"]["volume_id"].tolist()
    assert [(row.name, row.twin) for row in result.attention[:: len(held_out)]] == [
        ("octjepa", False),
        ("untrained", True),
    ]
    assert sorted(row.volume_id for row in result.attention) == sorted(2 * held_out)
    assert "attention" not in result.payload()

    file = tmp_path / "attention.parquet"
    write_attention(file, result.attention)
    maps = read_attention(file, held_out[:2])
    assert sorted(maps) == sorted(held_out[:2])
    for volume_id, (trained, twin) in maps.items():
        count = frame["volume_id"].tolist().index(volume_id) % 5 + 2
        assert (trained.untrained, twin.untrained, trained.target) == (False, True, "lesion0")
        assert trained.grid_index.tolist() == list(range(6))[::-1][:count]
        assert trained.attention.sum() == pytest.approx(1, abs=1e-5)
        shares = trained.even_shares()
        assert shares.shape == GRID
        assert np.isnan(shares).sum() == 6 - count
        assert shares.reshape(-1)[5] == pytest.approx(trained.attention[0] * count)
    assert (trained.attention != twin.attention).any()
    with pytest.raises(UsageError, match="none of the 1 eyes"):
        read_attention(file, ["somebody else"])
    quiet = probe_with([table], tmp_path / "labels.tsv", ["lesion0"], **options)
    assert quiet.attention == []
