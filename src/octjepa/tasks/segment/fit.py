"""`octjepa segment RECIPE`: a head is made on training people, chosen on validation people, judged once on test people.

Beside it always: the same head on the untrained encoder, on intensity alone (the voxels of the patches; of the decoder
the volume without tokens), and the place prior, which sees no picture.
"""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.checkpoint import PretrainedEncoder, load_encoder
from octjepa.checkpoint.location import place_of
from octjepa.config import science_hash
from octjepa.distributed.runtime import Runtime
from octjepa.embed.embedding import require_same_contract
from octjepa.embed.leakage import count_leaked_people, training_volumes_of_ids
from octjepa.embed.shard import weights_hash
from octjepa.errors import UsageError
from octjepa.files import write_json
from octjepa.metrics import test_set_ledger
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.comparisons import paired_difference
from octjepa.metrics.findings import Findings
from octjepa.metrics.intervals import MIN_PEOPLE
from octjepa.progress import bar
from octjepa.remote import is_remote
from octjepa.store import CanonicalVolume, Store
from octjepa.tasks.segment import decoder
from octjepa.tasks.segment.bscans import BSCANS, write_bscans
from octjepa.tasks.segment.evaluation import Judged, Scores, judge, people_with
from octjepa.tasks.segment.figure import draw_thickness
from octjepa.tasks.segment.folder import RESULTS, Head, is_head, save_head
from octjepa.tasks.segment.labelled_volumes import LabelledVolumes, NativeLabels
from octjepa.tasks.segment.linear import solve
from octjepa.tasks.segment.prior import Prior
from octjepa.tasks.segment.recipe import SegmentRecipe
from octjepa.tasks.segment.thickness import SECTORS
from octjepa.tasks.segment.windows import of_encoder, of_pixels

COMMAND = "octjepa segment"
log = logging.getLogger(__name__)
_BESIDE = ("untrained", "intensity", "place_prior")


def segment_store(
    settings: SegmentRecipe,
    checkpoint: str | Path,
    store: Store,
    labels: Path,
    out: Path,
    classes: Sequence[str] = (),
    ledger_folder: Path | None = None,
) -> dict[str, Any]:
    """Makes and judges a head; writes it, results.json, etdrs.tsv and pictures into `out`; returns what the verb says.

    ledger_folder: counts the uses of the test set, beside the folder of labels where none is named. Raises UsageError
    (labels that do not fit the store, a head in `out`, a ledger that cannot be written), ContractError,
    CheckpointError.
    """
    decoder.monai("metrics")  # its absence is told before the work
    if is_head(out):
        raise UsageError(f"{out} holds a head already: name a new folder, so that no results mix")
    device = Runtime("fp32").device
    encoder = load_encoder(checkpoint).to(device)
    if encoder.name in _BESIDE:
        raise UsageError(f"the recipe of {checkpoint} is called {encoder.name}, as a row beside it: rename the recipe")
    require_same_contract(encoder, store, checkpoint)
    if encoder.recipe.tokens.patch_size[2] % settings.columns:
        raise UsageError(
            f"columns: {settings.columns} does not divide the {encoder.recipe.tokens.patch_size[2]} columns of a patch"
        )
    cohort = LabelledVolumes(store, labels, encoder.recipe, classes)
    labelled = store.table[store.table["volume_id"].isin(cohort.stored)]
    leaked = count_leaked_people(labelled, training_volumes_of_ids(encoder.trained_on, place_of(checkpoint)))
    if leaked:
        raise UsageError(
            f"the encoder of {checkpoint} was pretrained on {leaked} labelled people of val or test: split the store "
            "as for pretraining, or take another encoder"
        )
    looks = ledger_folder or test_set_ledger.default_folder(labels)
    test_set_ledger.check_writable(looks)
    count = len(cohort.classes) + 1
    prior = Prior.of((read()[1] for read in cohort.readers("train")), count, settings.columns)
    untrained = encoder.untrained().to(device)
    heads, chosen = _make(settings, encoder, untrained, cohort, prior)
    found, name = Findings(notes=cohort.notes), ", ".join(cohort.classes)
    measured = [f"{science_hash(settings)} {of}" for of in (*map(weights_hash, (encoder, untrained)), *_BESIDE[1:])]
    test_set_ledger.record_uses(looks, COMMAND, {name: cohort.test_set()}, {name: measured}, found)
    say = {**{name: head.scores for name, head in heads.items()}, "place_prior": _blind(prior)}
    scores, judged, abouts = _judge(say, cohort, settings)
    ours = judged[encoder.name]
    _tell_classes(encoder.name, ours, cohort.classes, scores.people, found)
    out.mkdir(parents=True, exist_ok=True)
    _write_etdrs(out / "etdrs.tsv", cohort, ours, abouts)
    picture = _draw(out / "thickness.svg", cohort, ours[0], abouts[0])
    saved = save_head(out, heads[encoder.name], cohort.classes, settings, encoder)
    rows = scores.rows()
    mine = {f"{row['metric']}_{row['class']}".removesuffix("_mean"): row for row in rows if row["name"] == encoder.name}
    told = {
        "metrics": {key: {k: row[k] for k in ("value", "low", "high", "n", "n_people")} for key, row in mine.items()},
        "checkpoint": str(saved),
        "classes": list(cohort.classes),
        "encoder": encoder.name,
        "labelled": cohort.counts(),
        "store": store.location if is_remote(store.location) else os.path.relpath(store.path, out),
        "chosen": chosen,
        "paired": [_paired(scores, encoder.name, other) for other in _BESIDE],
        "rows": rows,
        "faults": found.faults,
        "notes": found.notes,
        "uses": found.uses,
        "bscans": write_bscans(out / BSCANS, heads[encoder.name].scores, cohort, ours),
        "etdrs": str(out / "etdrs.tsv"),
        "figure": str(picture),
    }
    write_json(out / RESULTS, told)
    return told


def _make(
    settings: SegmentRecipe,
    encoder: PretrainedEncoder,
    untrained: PretrainedEncoder,
    cohort: LabelledVolumes,
    prior: Prior,
) -> tuple[dict[str, Head], dict[str, Any]]:
    """Heads by row name, and what validation chose for each."""
    heads: dict[str, Head] = {}
    chosen: dict[str, Any] = {}
    recipe = encoder.recipe
    for name, network in ((encoder.name, encoder), ("untrained", untrained), ("intensity", encoder)):
        if settings.decoder is None:
            featurise = of_pixels(recipe) if name == "intensity" else of_encoder(network)
            train, val = ((read() for read in cohort.readers(split)) for split in ("train", "val"))
            heads[name], penalty, found = solve(featurise, train, val, prior, recipe)
            chosen[name] = {"head": settings.head, "penalty": penalty, "val_dice": found}
        else:
            made = decoder.train(
                network, settings.decoder, settings.seed, prior, cohort.readers, blind=name == "intensity"
            )
            heads[name] = made[0]
            chosen[name] = {"head": settings.head, "update": made[1], "val_dice": made[2]}
        log.info("%s: %s", name, chosen[name])
    return heads, chosen


def _blind(prior: Prior) -> Callable[[CanonicalVolume], np.ndarray]:
    return lambda volume: prior.scores(volume.pixels.shape)


def _judge(
    say: dict[str, Callable[[CanonicalVolume], np.ndarray]], cohort: LabelledVolumes, settings: SegmentRecipe
) -> tuple[Scores, dict[str, list[Judged]], list[NativeLabels]]:
    """Every row on every test volume, once; and how each scan lies (its voxels left out)."""
    test = cohort.of("test")
    people = [str(row["person_id"]) for row in test]
    draws = Draws(people, settings.resamples, settings.seed)
    scores = Scores(people, cohort.classes, [cohort.stored[row["volume_id"]] for row in test], draws)
    judged: dict[str, list[Judged]] = {name: [] for name in say}
    abouts = []
    with bar("test", len(test), "volume") as progress:
        for row in test:
            volume, truth = (
                cohort.store.read(row["volume_id"]),
                cohort.native(row, settings.centre, settings.first_bscan),
            )
            abouts.append(replace(truth, codes=truth.codes[:0]))
            for name, head in say.items():
                judged[name].append(judge(head(volume), cohort.stored[row["volume_id"]], truth))
            progress.advance()
    for name, found in judged.items():
        scores.add(name, found)
    return scores, judged, abouts


def _tell_classes(
    name: str, judged: Sequence[Judged], classes: Sequence[str], people: Sequence[str], found: Findings
) -> None:
    """Classes that the test scans hold and nobody finds, that too few people have, and that no test scan holds."""
    counts = np.stack([one.counts for one in judged])
    held, everybody = counts[:, :, 2].sum(axis=0) > 0, len(set(people))
    for place, label in enumerate(classes):
        said_mm3, few = float(counts[:, place, 1].sum()), people_with(people, counts[:, [place], 2])
        if not held[place]:
            found.add_note(
                f"{label}: no test scan holds it, so the means leave it out; {name} says it of {said_mm3:.3g} mm3"
            )
            continue
        if not said_mm3:
            found.add_fault("class_never_said", f"{name} says {label} of no voxel of the test scans, which hold it")
        if few < MIN_PEOPLE <= everybody:
            text = (
                f"{label}: {few} of {everybody} test people have it, fewer than the {MIN_PEOPLE} that an interval "
                "needs: its rows have none"
            )
            if held.sum() == 1:
                found.add_note(text)
            else:
                found.add_fault("rare_class", f"{text}, and that of the means hangs on whether these people are drawn")


def _paired(scores: Scores, ours: str, other: str) -> dict[str, Any]:
    pair = paired_difference(scores.estimates[ours, "dice", "mean"], scores.estimates[other, "dice", "mean"])
    return {
        "name": ours, "reference": other, "metric": "dice", "difference": pair.difference, "low": pair.low,
        "high": pair.high, "n_people": pair.n_people,
    }  # fmt: skip


def _write_etdrs(path: Path, cohort: LabelledVolumes, judged: Sequence[Judged], abouts: Sequence[NativeLabels]) -> None:
    """A row per test scan, class and sector, said and true, with what the centre and the vertical rest on."""
    columns = ("volume_id", "eye", "class", "sector", "said_um", "true_um", "centre", "vertical")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(columns)
        for row, one, about in zip(cohort.of("test"), judged, abouts, strict=True):
            for number, name in enumerate(cohort.classes):
                for place, sector in enumerate(SECTORS):
                    said, true = (_um(values[number, place]) for values in (one.said_etdrs, one.true_etdrs))
                    rests_on = about.centre_from, about.vertical_from
                    writer.writerow([row["volume_id"], row["eye"], name, sector, said, true, *rests_on])


def _um(value: float) -> str:
    return f"{value:.1f}" if np.isfinite(value) else ""


def _draw(path: Path, cohort: LabelledVolumes, one: Judged, about: NativeLabels) -> Path:
    """Thickness maps of the first test scan."""
    row, (dz, _, dx) = cohort.of("test")[0], about.native.spacing_mm
    title = f"{row['volume_id']} {row['eye']}".strip()
    return draw_thickness(path, one.said_um, one.said_etdrs, cohort.classes, (dz, dx), about.lie, title)
