"""`octjepa finetune RECIPE`: tuned on training people, chosen on validation people, measured once on test people.

Order of work, which is the protocol: people and labels are checked. All volumes are embedded by the encoder as it is,
without a label. The network is tuned. The use of the test set is written into its ledger. Only then are labels of the
test set compared with anything, with the tuned network and with everything next to it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from octjepa.checkpoint.weights import TUNED as TUNED_FOLDER
from octjepa.distributed.precision import agree_on_precision
from octjepa.distributed.runtime import Runtime, distributed_context
from octjepa.embed.alignment import feature_sets
from octjepa.embed.embedding import embed_store, require_same_contract
from octjepa.embed.parts import discard_leftovers
from octjepa.embed.table import Embeddings, read_embeddings
from octjepa.encoders.base import hash_weights
from octjepa.errors import OctjepaError, UsageError, counted
from octjepa.evaluate.label_fractions import TooFewLabelsError
from octjepa.evaluate.measurements import MACRO
from octjepa.evaluate.probe import ProbeResult
from octjepa.evaluate.protocol import Ledger
from octjepa.evaluate.results import Row, TunedChoice, TunedPaired
from octjepa.evaluate.subgroups import SubgroupColumn
from octjepa.files import write_json
from octjepa.locks import writer_lock
from octjepa.metrics import test_set_ledger
from octjepa.metrics.findings import FEWEST_TEST_PEOPLE
from octjepa.record import plain
from octjepa.store import Store
from octjepa.tasks.finetune.evaluation import TUNED, Scores, Shifts, evaluate, write_predictions
from octjepa.tasks.finetune.external import TunableExternal, load_start, tuned_network
from octjepa.tasks.finetune.folder import (
    RESULTS,
    check_folder,
    is_begun,
    open_folder,
    read_results,
    recorded_precision,
    save_tuned,
)
from octjepa.tasks.finetune.lora import check_layers, require_peft
from octjepa.tasks.finetune.network import TUNED_POOL, TunableEncoder, TunedNetwork
from octjepa.tasks.finetune.predict import predict_split, set_reference, validation_loss
from octjepa.tasks.finetune.recipe import FinetuneRecipe
from octjepa.tasks.finetune.result import FinetuneResult, TunedWithFewerLabels
from octjepa.tasks.finetune.training import tune
from octjepa.tasks.finetune.tuning_data import TuningData, prepare_tuning_data
from octjepa.train.hardware_settings import choose_loader_workers, choose_threads, print_choices
from octjepa.train.learner import STATES
from octjepa.views.workers import translate_worker_errors

COMMAND = "octjepa finetune"
LABELLED = "labelled.json"
SCRATCH = "untrained"  # the name of the network that was tuned from its first weights
_FROZEN = "frozen.parquet"
_PREDICTIONS = "predictions.parquet"


@dataclass(frozen=True)
class FinetuneInputs:
    """The data that a fine-tuning starts from and is evaluated on.

    targets: label columns; default: those of the recipe. ledger_folder: where uses of the test set are recorded;
    default: next to the labels. frozen: the table of embeddings before tuning, which is made if it is absent; default:
    in the output folder. subgroups: columns; the results are also measured for each of their groups.
    """

    checkpoint: str | Path
    store: Store
    labels: Path
    targets: Sequence[str] = ()
    ledger_folder: Path | None = None
    frozen: Path | None = None
    subgroups: Sequence[SubgroupColumn] = ()


def finetune_store(recipe: FinetuneRecipe, inputs: FinetuneInputs, out: Path, resume: bool = False) -> FinetuneResult:
    """Tunes the encoder of `inputs` into the folder `out` and returns the results.

    Under torchrun every process calls it alike: rank 0 writes, all return the same. Raises UsageError (people, labels
    or folder that cannot be used), ContractError (store prepared otherwise), CheckpointError, Interrupted (a signal
    came; a checkpoint was written).
    """
    with translate_worker_errors(), distributed_context() as runtime, ExitStack() as lock:
        runtime.run_on_rank_zero(lambda: lock.enter_context(writer_lock(out)))
        runtime.run_on_rank_zero(lambda: check_folder(out, resume))
        precision = agree_on_precision(recipe.precision, lambda: recorded_precision(out), runtime)
        recipe = recipe.model_copy(update={"precision": precision})
        if runtime.rank == 0:
            workers = choose_loader_workers(recipe.loader_workers, runtime.device)
            choices = {"threads": choose_threads(), "loader_workers": workers}
            print_choices(runtime.device, precision, runtime.precision_reason, choices)
        return _finetune(recipe, inputs, out, runtime)


def _check_measured(subgroups: Sequence[SubgroupColumn], results: FinetuneResult, out: Path) -> None:
    """Raises UsageError where finished results lack a subgroup column: the test set is read once."""
    measured = {subgroup.column for subgroup in results.subgroups}
    if lacking := [column.name for column in subgroups if column.name not in measured]:
        raise UsageError(
            f"{out} is finished and was not measured by {', '.join(lacking)}: tune into a new --out with --subgroups"
        )


def _clean(out: Path) -> None:
    """Removes what only an unfinished fine-tuning needs."""
    for folder in (out, out / "scratch"):
        shutil.rmtree(folder / STATES, ignore_errors=True)


def finetune_with_fewer_labels(
    recipe: FinetuneRecipe, counts: Sequence[int], inputs: FinetuneInputs, out: Path
) -> dict[str, TunedWithFewerLabels]:
    """`finetune_store` with labels of each of `counts` training people, in `out/labelled-<count>`.

    Returns by count, as text, the rows and paired differences, or why there are none; `out/labelled.json` holds the
    same. What is finished there is not tuned again, and what was stopped continues. Under torchrun as `finetune_store`:
    a caller of both holds one `distributed_context` around them.
    """
    by_count: dict[str, TunedWithFewerLabels] = {}
    with distributed_context() as runtime:  # one for all counts: processes that leave and join again miss each other
        for count in counts:
            folder, limited = out / f"labelled-{count}", recipe.model_copy(update={"labelled": count})
            try:
                shared = replace(inputs, frozen=out / _FROZEN, subgroups=())
                summary = finetune_store(limited, shared, folder, is_begun(folder))
            except TooFewLabelsError as error:
                by_count[str(count)] = TunedWithFewerLabels(left_out=(str(error),))
                continue
            left_out = tuple(note for note in summary.notes if note.startswith(f"{count} labelled people: "))
            by_count[str(count)] = TunedWithFewerLabels(summary.rows, summary.paired, left_out)
        runtime.run_on_rank_zero(lambda: write_json(out / LABELLED, plain(by_count)))
    return by_count


def _finetune(recipe: FinetuneRecipe, inputs: FinetuneInputs, out: Path, runtime: Runtime) -> FinetuneResult:
    checkpoint, store = inputs.checkpoint, inputs.store
    if recipe.batch % runtime.world_size:
        raise UsageError(
            f"batch {recipe.batch} cannot be divided evenly over {runtime.world_size} processes: change either"
        )
    if recipe.lora.rank:
        require_peft()
    encoder = load_start(checkpoint, store.preprocessing).to(runtime.device)
    require_same_contract(encoder, store, checkpoint)
    is_external = isinstance(encoder, TunableExternal)
    frozen = encoder.weights_hash()
    frozen_result = ProbeResult()

    def prepare() -> tuple[Ledger, TuningData, FinetuneResult | None] | TooFewLabelsError:
        ledger = Ledger.of(inputs.labels, inputs.ledger_folder, COMMAND)
        try:
            prepared = prepare_tuning_data(
                recipe, encoder, checkpoint, store, inputs.labels, inputs.targets, frozen_result, inputs.subgroups
            )
        except TooFewLabelsError as error:  # a result, so that every rank raises it and not only rank 0
            return error
        if recipe.lora.rank and not is_begun(out):
            volume = store.read(prepared.volume_ids("train")[0])
            check_layers(encoder.encoder, recipe.lora, lambda: encoder.encode_volumes([volume]))
        open_folder(out, recipe, encoder, frozen, store, prepared, runtime)
        return ledger, prepared, read_results(out)

    outcome = runtime.run_on_rank_zero(prepare)
    if isinstance(outcome, TooFewLabelsError):
        raise outcome
    ledger, data, finished = outcome
    if finished is not None:  # by a call of the same recipe, encoder and labels, as open_folder found
        runtime.run_on_rank_zero(lambda: _clean(out))  # a kill may have come in between
        _check_measured(inputs.subgroups, finished, out)
        return finished
    frozen_table = inputs.frozen or out / _FROZEN
    # Before tuning, and by this encoder: a run that is still training has another newest checkpoint later.
    _embed_frozen(encoder, store, frozen_table, frozen, inputs, runtime)
    tuned = [_tune(data.name, encoder, out, recipe, data, store, runtime, frozen_result)]
    if recipe.scratch:
        untrained = encoder.untrained().to(runtime.device)
        tuned.append(_tune(SCRATCH, untrained, out / "scratch", recipe, data, store, runtime, frozen_result))
    if is_external and recipe.drop_path:
        frozen_result.add_note(f"{data.name} is of another project: drop_path was not applied")
    table = _frozen_embeddings(frozen_table, frozen, data)
    used = _measured(data, tuned, table)
    test_set = runtime.run_on_rank_zero(lambda: data.evaluation.open_test_set(ledger, used, frozen_result))
    test = {run.name: (predict_split(run.network, data, store, "test", runtime), run.shifts) for run in tuned}

    def finish() -> FinetuneResult:
        paired = evaluate(data, table, test, test_set, frozen_result)
        ours = {"val": (tuned[0].val, tuned[0].shifts), "test": test[data.name]}
        write_predictions(out / _PREDICTIONS, data, recipe.level, ours)
        result = _result(data, frozen_result, paired, tuned[0].saved, out)
        write_json(out / RESULTS, result.to_json())
        _clean(out)
        return result

    return runtime.run_on_rank_zero(finish)


@dataclass(frozen=True)
class _TunedRun:
    """A tuned network: its folder, its scores of validation volumes, and the decision shifts that follow from them."""

    name: str
    network: TunedNetwork
    folder: Path
    val: Scores
    shifts: Shifts
    saved: Path


def _tune(
    name: str,
    start: TunableEncoder,
    folder: Path,
    recipe: FinetuneRecipe,
    data: TuningData,
    store: Store,
    runtime: Runtime,
    found: ProbeResult,
) -> _TunedRun:
    network = tuned_network(start, data.tasks).to(runtime.device)
    runtime.run_on_rank_zero(lambda: folder.mkdir(exist_ok=True))
    if recipe.lora.rank:
        network.add_adapters(recipe, store.read(data.volume_ids("train")[0]))
    learner = tune(network, recipe, data, store, runtime, folder)
    network.merge_adapters()  # before anything is measured: what is scored is what is written
    val = predict_split(network, data, store, "val", runtime)
    shifts = [validation_loss(*three)[1] for three in zip(data.targets, data.labels, val, strict=True)]
    set_reference(network, data, store, runtime)
    update = learner.best_update or learner.updates
    by = "val" if learner.best_update else "last"
    found.choices.append(TunedChoice(name, TUNED, TUNED_POOL, update, learner.update, by))
    if runtime.rank == 0 and not learner.best_update:
        found.add_note(f"{name}: no labelled person in val, so nothing was chosen: the last weights stay")
    if runtime.rank == 0 and learner.skipped:
        found.add_note(f"{name}: skipped {counted(learner.skipped, 'update')} without a finite gradient")
    saved = runtime.run_on_rank_zero(
        lambda: save_tuned(folder / TUNED_FOLDER, network, recipe, data, store, shifts, update)
    )
    return _TunedRun(name, network, folder, val, shifts, saved)


def _embed_frozen(
    encoder: TunableEncoder, store: Store, path: Path, weights: str, inputs: FinetuneInputs, runtime: Runtime
) -> None:
    """Writes the embeddings of the encoder before tuning, of every volume, to `path` unless they are there.

    Raises OctjepaError: processes loaded different weights; UsageError: the table of `inputs` is of other weights.
    """
    if len(set(runtime.all_gather([weights]))) > 1:
        raise OctjepaError(f"{inputs.checkpoint} changed while the processes read it: give --from a step-* folder")
    of_table = runtime.broadcast_object(read_embeddings(path).weights if runtime.rank == 0 and path.is_file() else None)
    if of_table == weights:
        runtime.run_on_rank_zero(lambda: discard_leftovers(path))
    elif of_table is not None and inputs.frozen is not None:  # of the same encoder with all labels
        raise UsageError(
            f"{path} was made of other weights than {inputs.checkpoint} has now: give --from the step-* folder of one "
            "checkpoint"
        )
    else:
        embed_store(encoder, store, path)


def _frozen_embeddings(path: Path, weights: str, data: TuningData) -> Embeddings:
    """The embeddings of the encoder before tuning, of every volume of `data`. Raises OctjepaError: others are there."""
    table = read_embeddings(path)
    same_volumes = table.frame["volume_id"].tolist() == data.frame["volume_id"].tolist()
    if table.weights != weights or not same_volumes:
        what = "the store" if not same_volumes else path.name
        raise OctjepaError(f"{what} changed while {path.parent} was made: start a new run with another --out")
    return table


def _measured(data: TuningData, tuned: Sequence[_TunedRun], table: Embeddings) -> dict[str, list[str]]:
    """The identity of the results in the ledger: networks by weights, and what embeddings gave as in `octjepa
    probe`.
    """
    read = [f"{hash_weights(run.network, type(run.network).__name__)} {TUNED}" for run in tuned]
    sets = feature_sets([("", table)], (table.default_pool,))
    read += [test_set_ledger.fingerprint(features, "linear") for *_, features in sets]
    return dict.fromkeys(data.evaluation.test_sets, read)


def _result(
    data: TuningData, probe_result: ProbeResult, paired: Sequence[TunedPaired], saved: Path, out: Path
) -> FinetuneResult:
    tuned_rows = [row for row in probe_result.rows if row.name == data.name and row.probe == TUNED]
    one_target = len(data.targets) == 1
    metrics = {
        row.metric if one_target or row.target == MACRO else f"{row.metric}_{row.target}": row.measured()
        for row in tuned_rows
    }
    return FinetuneResult(
        summary=_summary(tuned_rows, paired[0]),
        metrics=metrics,
        checkpoint=str(saved),
        paired=tuple(paired),
        faults=tuple(probe_result.faults),
        notes=tuple(probe_result.notes),
        uses=tuple(probe_result.uses),
        rows=tuple(probe_result.rows),
        baselines=tuple(probe_result.baselines),
        choices=tuple(probe_result.choices),
        confusions=tuple(probe_result.confusions),
        targets=tuple(probe_result.targets),
        protocol=probe_result.protocol,
        subgroups=tuple(probe_result.subgroups),
        predictions=str(out / _PREDICTIONS),
        results=str(out / RESULTS),
    )


def _summary(tuned_rows: Sequence[Row], first: TunedPaired) -> str:
    """One line: the tuned metric, its difference from the frozen encoder, and whether the test set is too small."""
    row = next(row for row in tuned_rows if (row.target, row.metric) == (first.target, first.metric))
    is_small = (row.n_people or 0) < FEWEST_TEST_PEOPLE
    few = f": too few to conclude anything, at least {FEWEST_TEST_PEOPLE} people are needed" if is_small else ""
    return (
        f"{first.target}: {first.metric} {_number(row.value)}{_interval(row)} tuned; tuned minus frozen "
        f"{_number(first.difference, '+')}{_interval(first, '+')}; {counted(row.n or 0, 'test case')} of "
        f"{counted(row.n_people or 0, 'person')}{few}"
    )


def _number(value: float | None, sign: str = "") -> str:
    return "none" if value is None or not np.isfinite(value) else f"{value:{sign}.3f}"


def _interval(row: Row | TunedPaired, sign: str = "") -> str:
    return "" if row.low is None or row.high is None else f" ({row.low:{sign}.3f} to {row.high:{sign}.3f})"
