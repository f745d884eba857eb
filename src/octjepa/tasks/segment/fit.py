"""`octjepa segment RECIPE`: a head is made on training people, chosen on validation people, measured on test people.

Three baselines are always measured: the same head on the untrained encoder, the same head on intensity (the voxels of
the patches; for the decoder the volume without tokens), and the position prior, which reads no image.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from octjepa.checkpoint.location import check_writable
from octjepa.config import science_hash
from octjepa.distributed.runtime import Runtime
from octjepa.embed.embedding import require_same_contract
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.external import refuse_external
from octjepa.errors import UsageError
from octjepa.evaluate.protocol import Ledger, TestSet, open_test_set, refuse_pretraining_subjects
from octjepa.evaluate.results import HeadPaired
from octjepa.files import write_json
from octjepa.locks import writer_lock
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.comparisons import paired_difference
from octjepa.metrics.findings import Findings
from octjepa.progress import bar
from octjepa.remote import is_remote
from octjepa.store import Store
from octjepa.tasks.segment import decoder
from octjepa.tasks.segment.bscans import BSCANS, write_bscans
from octjepa.tasks.segment.evaluation import HeadEstimates, ScanFigures, evaluate_scan, report_classes
from octjepa.tasks.segment.folder import HEAD_FOLDER, RESULTS, Head, is_head, save_head
from octjepa.tasks.segment.labelled_volumes import LabelledVolumes, NativeLabels
from octjepa.tasks.segment.linear import fit_linear_head
from octjepa.tasks.segment.recipe import SegmentRecipe
from octjepa.tasks.segment.result import ChosenHead, SegmentationResult
from octjepa.tasks.segment.windows import PositionPrior, encoder_tokens, pixel_tokens
from octjepa.tasks.thickness import SECTORS, draw_thickness, write_table
from octjepa.train.learner import STATES
from octjepa.volume import CanonicalVolume

COMMAND = "octjepa segment"
log = logging.getLogger(__name__)
_REFERENCES = ("untrained", "intensity", "position_prior")
_TRAINING = "training"  # in the folder of a head: the states of its decoders while they are trained
Score = Callable[[CanonicalVolume], np.ndarray]  # scores of the classes [classes, D, H, W]


def segment_store(
    recipe: SegmentRecipe,
    checkpoint: str | Path,
    store: Store,
    labels: Path,
    out: Path,
    classes: Sequence[str] = (),
    ledger_folder: Path | None = None,
) -> SegmentationResult:
    """Makes and measures a head; writes it, results.json, etdrs.tsv and images into `out`; returns the results.

    A decoder whose training was stopped continues where the same call left it. ledger_folder: counts the uses of the
    test set, next to the folder of labels if none is named. Raises UsageError (labels that do not fit the store, a head
    in `out`, a ledger that cannot be written), ContractError, CheckpointError, Interrupted (a signal came).
    """
    refuse_external(checkpoint, "segment")
    with writer_lock(out):
        if is_head(out) and (out / RESULTS).is_file():
            raise UsageError(f"{out} holds a head already: name a new folder, so that no results mix")
        results = _segment_store(recipe, checkpoint, store, labels, out, classes, ledger_folder)
        for states in (out / _TRAINING).glob(f"*/{STATES}"):
            shutil.rmtree(states, ignore_errors=True)
    return results


def _segment_store(
    recipe: SegmentRecipe,
    checkpoint: str | Path,
    store: Store,
    labels: Path,
    out: Path,
    classes: Sequence[str],
    ledger_folder: Path | None,
) -> SegmentationResult:
    device = Runtime("fp32").device
    encoder = load_encoder(checkpoint).to(device)
    if encoder.name in _REFERENCES:
        raise UsageError(
            f"the recipe of {checkpoint} is called {encoder.name}, as a result next to it: rename the recipe"
        )
    require_same_contract(encoder, store, checkpoint)
    if encoder.recipe.tokens.patch_size[2] % recipe.columns:
        raise UsageError(
            f"columns: {recipe.columns} does not divide the {encoder.recipe.tokens.patch_size[2]} columns of a patch"
        )
    labelled = LabelledVolumes(store, labels, encoder.recipe, classes)
    refuse_pretraining_subjects(store.table[store.table["volume_id"].isin(labelled.stored)], encoder, checkpoint)
    ledger = Ledger.of(labels, ledger_folder, COMMAND)
    check_writable(out / HEAD_FOLDER, out)
    for name in (encoder.name, *_REFERENCES[:2]) if recipe.decoder is not None else ():
        check_writable(out / _TRAINING / name / STATES, out)
    prior = PositionPrior.from_labels(
        (read()[1] for read in labelled.readers("train")), len(labelled.classes) + 1, recipe.columns
    )
    untrained = encoder.untrained().to(device)
    heads, chosen = _fit_heads(recipe, encoder, untrained, labelled, prior, out)
    findings, name = Findings(notes=labelled.notes), ", ".join(labelled.classes)
    weights = [network.weights_hash() for network in (encoder, untrained)]
    used = [f"{science_hash(recipe)} {of}" for of in (*weights, *_REFERENCES[1:])]
    people = [volume.person_id for volume in labelled.in_split("test")]
    draws = Draws(people, recipe.resamples, recipe.seed)
    test_set = open_test_set(ledger, {name: labelled.test_set()}, {name: used}, findings, draws, {name: people})
    score: dict[str, Score] = {**{name: head.scores for name, head in heads.items()}}
    score["position_prior"] = lambda volume: prior.scores(volume.pixels.shape)
    estimates, scans, truths = _evaluate(score, labelled, recipe, test_set)
    ours = scans[encoder.name]
    report_classes(encoder.name, ours, labelled.classes, estimates.people, findings)
    first = labelled.in_split("test")[0]
    figure = draw_thickness(
        out / "thickness.svg",
        ours[0].predicted_um,
        ours[0].predicted_etdrs,
        labelled.classes,
        truths[0].native.slice_mm,
        truths[0].native.column_mm,
        truths[0].scan,
        f"{first.volume_id} {first.eye}".strip(),
    )
    saved = save_head(out, heads[encoder.name], labelled.classes, recipe, encoder, checkpoint)
    rows = estimates.results()
    head_rows = {f"{row.metric}_{row.target}".removesuffix("_mean"): row for row in rows if row.name == encoder.name}
    results = SegmentationResult(
        metrics={key: row.measured() for key, row in head_rows.items()},
        checkpoint=str(saved),
        classes=tuple(labelled.classes),
        encoder=encoder.name,
        labelled=labelled.counts(),
        store=store.location if is_remote(store.location) else os.path.relpath(store.path, out),
        chosen=chosen,
        paired=tuple(_paired(estimates, encoder.name, other) for other in _REFERENCES),
        rows=tuple(rows),
        faults=tuple(findings.faults),
        notes=tuple(findings.notes),
        uses=tuple(findings.uses),
        bscans=tuple(write_bscans(out / BSCANS, heads[encoder.name].scores, labelled, ours)),
        etdrs=str(_write_etdrs(out / "etdrs.tsv", labelled, ours, truths)),
        figure=str(figure),
    )
    write_json(out / RESULTS, results.to_json())
    return results


def _fit_heads(
    recipe: SegmentRecipe,
    encoder: PretrainedEncoder,
    untrained: PretrainedEncoder,
    labelled: LabelledVolumes,
    prior: PositionPrior,
    out: Path,
) -> tuple[dict[str, Head], dict[str, ChosenHead]]:
    """Heads by name, and what validation chose for each."""
    heads: dict[str, Head] = {}
    chosen: dict[str, ChosenHead] = {}
    networks = {encoder.name: encoder, "untrained": untrained, "intensity": encoder}
    for name, network in networks.items():
        if recipe.decoder is None:
            extract = pixel_tokens(encoder.recipe) if name == "intensity" else encoder_tokens(network)
            train, val = ((read() for read in labelled.readers(split)) for split in ("train", "val"))
            heads[name], penalty, dice = fit_linear_head(extract, train, val, prior, encoder.recipe)
            chosen[name] = ChosenHead(recipe.head, dice, penalty=penalty)
        else:
            folder = out / _TRAINING / name
            folder.mkdir(parents=True, exist_ok=True)
            origin = f"{science_hash(recipe)} {network.weights_hash()} {labelled.fingerprint()}"
            heads[name], update, dice = decoder.train(
                network,
                recipe.decoder,
                recipe.seed,
                prior,
                labelled.readers,
                name == "intensity",
                folder,
                hashlib.sha256(origin.encode()).hexdigest(),
            )
            chosen[name] = ChosenHead(recipe.head, dice, update=update)
        log.info("%s: %s", name, chosen[name].to_json())
    return heads, chosen


def _evaluate(
    score: dict[str, Score], labelled: LabelledVolumes, recipe: SegmentRecipe, test_set: TestSet
) -> tuple[HeadEstimates, dict[str, list[ScanFigures]], list[NativeLabels]]:
    """Every head on every test volume, once; and the geometry of each scan (its voxels left out)."""
    test = labelled.in_split("test")
    (people,) = test_set.people.values()
    labels = [labelled.stored[volume.volume_id] for volume in test]
    estimates = HeadEstimates(people, labelled.classes, labels, test_set.draws)
    scans: dict[str, list[ScanFigures]] = {name: [] for name in score}
    truths = []
    with bar("test", len(test), "volume") as progress:
        for entry, stored in zip(test, labels, strict=True):
            volume = labelled.store.read(entry.volume_id)
            truth = labelled.native(entry, recipe.centre, recipe.first_bscan)
            truths.append(replace(truth, codes=truth.codes[:0], known_layers=None))
            for name, scores in score.items():
                scans[name].append(evaluate_scan(scores(volume), stored, truth))
            progress.advance()
    for name, figures in scans.items():
        estimates.add(name, figures)
    return estimates, scans, truths


def _paired(estimates: HeadEstimates, ours: str, other: str) -> HeadPaired:
    pair = paired_difference(estimates.estimates[ours, "dice", "mean"], estimates.estimates[other, "dice", "mean"])
    return HeadPaired(name=ours, target="mean", metric="dice", reference=other, **vars(pair))


def _write_etdrs(
    path: Path, labelled: LabelledVolumes, scans: Sequence[ScanFigures], truths: Sequence[NativeLabels]
) -> Path:
    """An entry per test scan, class and sector, predicted and true, with what the centre and the vertical rest on."""
    columns = ("volume_id", "eye", "class", "sector", "predicted_um", "true_um", "centre", "vertical")
    entries = [
        (
            volume.volume_id,
            volume.eye,
            name,
            sector,
            float(figures.predicted_etdrs[number, index]),
            float(figures.true_etdrs[number, index]),
            truth.centre_from,
            truth.vertical_from,
        )
        for volume, figures, truth in zip(labelled.in_split("test"), scans, truths, strict=True)
        for number, name in enumerate(labelled.classes)
        for index, sector in enumerate(SECTORS)
    ]
    return write_table(path, columns, entries)
