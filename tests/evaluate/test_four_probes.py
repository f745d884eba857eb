"""All four probes next to all baselines on a small cohort: a planted effect is recovered, shuffled labels are
chance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from invented_cohort import probe_with
from octjepa.embed import token_folder
from octjepa.embed.table import TableFacts, read_embeddings, write_embeddings
from octjepa.embed.token_folder import TokenFolder
from octjepa.evaluate import probe_training
from octjepa.evaluate.probe import ProbeResult
from token_parts import token_part

Cohort = Callable[..., tuple[pd.DataFrame, pd.DataFrame]]
K = 6


def written(frame: pd.DataFrame, folder: Path) -> tuple[Path, TokenFolder]:
    """The table, and tokens of which one of K holds what the table's mean says and the others noise."""
    rng = np.random.default_rng(0)
    positions = np.zeros((len(frame), K), np.int32)
    arrays = {}
    for name in ("vector", "untrained"):
        mean = np.stack(frame[name].to_list())
        block = rng.normal(size=(len(frame), K, mean.shape[1]))
        block[np.arange(len(frame)), rng.integers(0, K, len(frame))] += mean
        arrays[name] = block
    (folder / "tokens").mkdir()
    token_folder.write_part(folder / "tokens", "a", token_part(**arrays, positions=positions))
    about = {"encoder": "octjepa", "weights": "w", "contract": "c" * 64, "dim": mean.shape[1], "grid": [1, 2, 3]}
    token_folder.write_index(folder / "tokens", {"a": frame["volume_id"].tolist()}, about)
    table = write_embeddings(folder / "e.parquet", frame, TableFacts(16, "octjepa", "c" * 64, weights="w"))
    return table, TokenFolder.open(folder / "tokens")


NAMES = ("linear", "knn", "mlp", "attentive")


@pytest.fixture(scope="module")
def run(cohort: Cohort, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], ProbeResult]:
    def probe(shuffled: bool) -> ProbeResult:
        folder = tmp_path_factory.mktemp("four")
        # Validation holds enough people of each class, so that no fold has to be learnt.
        frame, labels = cohort(people=180, signal=1.4, prevalence=(0.45,), shares=(0.35, 0.35, 0.3))
        if shuffled:
            labels["lesion0"] = np.random.default_rng(2).permutation(labels["lesion0"].to_numpy())
        labels.to_csv(folder / "labels.tsv", sep="\t", index=False)
        table, tokens = written(frame, folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probe_training, "EPOCHS", 25)
            return probe_with(
                [read_embeddings(table)],
                folder / "labels.tsv",
                ["lesion0"],
                probes=NAMES,
                pools=["mean_std_max"],
                bootstrap=400,
                tokens=[tokens],
            )

    return probe


@pytest.mark.slow
def test_a_planted_effect_is_recovered_above_all_baselines_by_every_probe(run: Callable[[bool], ProbeResult]) -> None:
    result = run(False)
    rows = [row for row in result.rows if row["metric"] == "auroc"]
    baselines = [row for row in rows if row["name"] != "octjepa"]
    assert {row["name"] for row in baselines} == {"untrained", "histogram", "covariates", "majority"}
    assert {(row["name"], row["probe"]) for row in rows} >= {("untrained", probe) for probe in NAMES}
    for probe in NAMES:
        (ours,) = [row for row in rows if row["name"] == "octjepa" and row["probe"] == probe]
        assert ours["low"] > max(row["value"] for row in baselines), probe
        (paired,) = [one for one in result.comparisons if one["probe"] == probe]
        assert paired["low"] > 0, probe
    assert result.faults == []
    weights = result.targets[0]["class_weights"]
    assert weights[1] > weights[0]  # the lesion is the rarer class


@pytest.mark.slow
def test_shuffled_labels_leave_chance_in_every_interval(run: Callable[[bool], ProbeResult]) -> None:
    result = run(True)
    rows = [row for row in result.rows if row["metric"] == "auroc" and row["low"] is not None]
    assert {row["probe"] for row in rows} == set(NAMES)
    for row in rows:
        assert row["low"] <= 0.5 <= row["high"], row
    for one in result.comparisons:
        assert one["low"] < 0 < one["high"], one
