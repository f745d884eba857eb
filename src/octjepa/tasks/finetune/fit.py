"""`octjepa finetune RECIPE`: tuned on training people, chosen on validation people, judged once on test people.

Order of work, which is the protocol: people and labels are checked; the network is tuned; the look at the test set is
written into its ledger; only then is the test read, by the tuned network and by everything that stands beside it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.checkpoint import PretrainedEncoder, load_encoder
from octjepa.checkpoint.encoder import TUNED as TUNED_FOLDER
from octjepa.distributed.runtime import Runtime, distributed_context
from octjepa.embed.alignment import feature_sets
from octjepa.embed.embedding import embed_store, require_same_contract
from octjepa.embed.shard import weights_hash
from octjepa.embed.table import Embeddings, read_embeddings
from octjepa.errors import OctjepaError, UsageError
from octjepa.files import write_json, writer_lock
from octjepa.metrics import test_set_ledger
from octjepa.probe.results import MACRO, ProbeResult
from octjepa.store import Store
from octjepa.tasks.finetune.evaluation import TUNED, Scores, Shifts, judge, write_predictions
from octjepa.tasks.finetune.folder import save_tuned
from octjepa.tasks.finetune.network import POOL, TunedNetwork
from octjepa.tasks.finetune.recipe import FinetuneRecipe
from octjepa.tasks.finetune.run_folder import RESULTS, open_folder, read_results, refuse_folder
from octjepa.tasks.finetune.scores import held_out, read_scores
from octjepa.tasks.finetune.training import STATES, tune
from octjepa.tasks.finetune.tuning_data import Cohort, choose_cohort
from octjepa.views.workers import translate_worker_errors

COMMAND = "octjepa finetune"
SCRATCH = "untrained"  # the row of the network that was tuned from its first weights
_FROZEN = "frozen.parquet"
_PREDICTIONS = "predictions.parquet"


def finetune_store(
    settings: FinetuneRecipe,
    checkpoint: str | Path,
    store: Store,
    labels: Path,
    out: Path,
    targets: Sequence[str] = (),
    resume: bool = False,
    ledger_folder: Path | None = None,
) -> dict[str, Any]:
    """Tunes the encoder of `checkpoint` into the folder `out` and returns what the verb says.

    Under torchrun every process calls it alike: rank 0 writes, all return the same. Raises UsageError (people, labels
    or folder that cannot be used), ContractError (store prepared otherwise), CheckpointError, Interrupted (told to
    stop; a checkpoint was written).
    """
    with translate_worker_errors(), distributed_context(settings.precision) as runtime:
        runtime.run_on_rank_zero(lambda: refuse_folder(out, resume))
        finished = runtime.broadcast_object(read_results(out) if runtime.rank == 0 else None)
        if finished is not None:
            return dict(finished)
        return _finetune(settings, checkpoint, store, labels, out, targets, ledger_folder, runtime)


def _finetune(
    settings: FinetuneRecipe,
    checkpoint: str | Path,
    store: Store,
    labels: Path,
    out: Path,
    targets: Sequence[str],
    ledger_folder: Path | None,
    runtime: Runtime,
) -> dict[str, Any]:
    if settings.batch % runtime.world_size:
        raise UsageError(
            f"batch {settings.batch} cannot be dealt evenly over {runtime.world_size} processes: change either"
        )
    encoder = load_encoder(checkpoint).to(runtime.device)
    require_same_contract(encoder, store, checkpoint)
    frozen = weights_hash(encoder)
    looks = ledger_folder or test_set_ledger.default_folder(labels)
    found = ProbeResult()
    held: list[Cohort] = []

    def prepare() -> None:
        test_set_ledger.check_writable(looks)
        held.append(choose_cohort(settings, encoder, checkpoint, store, labels, targets, found))
        open_folder(out, settings, encoder, frozen, store, held[0], runtime)

    runtime.run_on_rank_zero(prepare)
    cohort: Cohort = runtime.broadcast_object(held[0] if held else None)
    with writer_lock(out) if runtime.rank == 0 else nullcontext():
        arms = [_tune(cohort.name, encoder, out, settings, cohort, store, runtime, found)]
        if settings.scratch:
            untrained = encoder.untrained().to(runtime.device)
            arms.append(_tune(SCRATCH, untrained, out / "scratch", settings, cohort, store, runtime, found))
        table = _frozen(checkpoint, store, out / _FROZEN, frozen, cohort, runtime)
        runtime.run_on_rank_zero(
            lambda: test_set_ledger.record_uses(looks, COMMAND, cohort.test_sets, _measured(cohort, arms, table), found)
        )
        test = {one.name: (read_scores(one.network, cohort, store, "test", runtime), one.shifts) for one in arms}
        told: list[dict[str, Any]] = []

        def finish() -> None:
            paired = judge(cohort, table, test, settings.resamples, settings.seed, found)
            ours = {"val": (arms[0].val, arms[0].shifts), "test": test[cohort.name]}
            write_predictions(out / _PREDICTIONS, cohort, settings.level, ours)
            told.append(_payload(cohort, found, paired, arms[0].saved, out))
            write_json(out / RESULTS, told[0])
            for one in arms:
                shutil.rmtree(one.folder / STATES, ignore_errors=True)

        runtime.run_on_rank_zero(finish)
    payload: dict[str, Any] = runtime.broadcast_object(told[0] if told else None)
    return payload


@dataclass(frozen=True)
class _Arm:
    """A tuned network: its scores of validation volumes, the decision shifts they gave, and where it was written."""

    name: str
    network: TunedNetwork
    folder: Path
    val: Scores
    shifts: Shifts
    saved: Path


def _tune(
    name: str,
    start: PretrainedEncoder,
    folder: Path,
    settings: FinetuneRecipe,
    cohort: Cohort,
    store: Store,
    runtime: Runtime,
    found: ProbeResult,
) -> _Arm:
    network = TunedNetwork(start, cohort.tasks).to(runtime.device)
    runtime.run_on_rank_zero(lambda: folder.mkdir(exist_ok=True))
    progress = tune(network, settings, cohort, store, runtime, folder)
    val = read_scores(network, cohort, store, "val", runtime)
    shifts = [held_out(*three)[1] for three in zip(cohort.asked, cohort.tunings, val, strict=True)]
    kept = progress.best_update or progress.update
    by = "val" if progress.best_update else "last"
    found.choices.append({"name": name, "probe": TUNED, "pool": POOL, "update": kept, "of": progress.update, "by": by})
    if runtime.rank == 0 and not progress.best_update:
        found.add_note(f"{name}: nobody with labels in val, so nothing was chosen: the last weights stay")
    if runtime.rank == 0 and progress.skipped:
        found.add_note(f"{name}: {progress.skipped} updates without a finite gradient were skipped")
    saved: list[Path] = []
    runtime.run_on_rank_zero(
        lambda: saved.append(save_tuned(folder / TUNED_FOLDER, network, settings, cohort, shifts, kept))
    )
    return _Arm(name, network, folder, val, shifts, saved[0] if saved else folder)


def _frozen(
    checkpoint: str | Path, store: Store, path: Path, weights: str, cohort: Cohort, runtime: Runtime
) -> Embeddings:
    """The embeddings of the encoder as it came, of every volume of the cohort; those of before where they are there."""
    there = runtime.broadcast_object(runtime.rank == 0 and path.is_file() and read_embeddings(path).weights == weights)
    if not there:
        embed_store(checkpoint, store, path)
    table = read_embeddings(path)
    if table.frame["volume_id"].tolist() != cohort.frame["volume_id"].tolist():
        raise OctjepaError(f"the store changed while {path.parent} was made: start anew with another --out")
    return table


def _measured(cohort: Cohort, arms: Sequence[_Arm], table: Embeddings) -> dict[str, list[str]]:
    """What the ledger knows the rows by: networks by weights, and what embeddings gave as in `octjepa probe`."""
    read = [f"{weights_hash(one.network.pretrained)} {TUNED}" for one in arms]
    read += [test_set_ledger.fingerprint(features, "linear") for *_, features in feature_sets([("", table)], (POOL,))]
    return dict.fromkeys(cohort.test_sets, read)


def _payload(
    cohort: Cohort, found: ProbeResult, paired: list[dict[str, Any]], saved: Path, out: Path
) -> dict[str, Any]:
    mine = [row for row in found.rows if row["name"] == cohort.name and row["probe"] == TUNED]
    one_target = len(cohort.asked) == 1
    metrics = {
        row["metric"] if one_target or row["target"] == MACRO else f"{row['metric']}_{row['target']}": {
            key: row[key] for key in ("value", "low", "high", "n", "n_people")
        }
        for row in mine
    }
    return {
        "summary": _summary(mine, paired),
        "metrics": metrics,
        "checkpoint": str(saved),
        "paired": paired,
        **{name: value for name, value in found.payload().items() if name not in ("paired", "comparisons")},
        "predictions": str(out / _PREDICTIONS),
        "results": str(out / RESULTS),
    }


def _summary(mine: list[dict[str, Any]], paired: list[dict[str, Any]]) -> str:
    """One line: the tuned figure, and what tuning gained over the same encoder frozen."""
    first = paired[0]
    row = next(row for row in mine if (row["target"], row["metric"]) == (first["target"], first["metric"]))
    return (
        f"{first['target']}: {first['metric']} {_figure(row['value'])}{_interval(row)} tuned; tuned minus frozen "
        f"{_figure(first['difference'], '+')}{_interval(first, '+')}; {row['n']} test cases of {row['n_people']} people"
    )


def _figure(value: float | None, sign: str = "") -> str:
    return "none" if value is None or not np.isfinite(value) else f"{value:{sign}.3f}"


def _interval(row: dict[str, Any], sign: str = "") -> str:
    known = row["low"] is not None and row["high"] is not None
    return f" ({row['low']:{sign}.3f} to {row['high']:{sign}.3f})" if known else ""
