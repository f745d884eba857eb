"""The demo: every stage on synthetic eyes, offline, in a few minutes, with the same code as for real scans.

It first applies the packaged models: the segmenter draws layers and fluid into one eye per device and is compared with
the known truth, and the packaged encoder embeds every eye. It then pretrains a small encoder for a few minutes, and
probes all encoders with the same pooling on people that no training has seen.

The length of the training depends on the machine. A few updates are timed; the demo then makes as many updates as leave
time for the later stages, but at least as many as its published results were measured with.

Output: a folder with phantom/, store/, segmented/, run/, packaged.parquet, embeddings.parquet, probe.json, demo.json
and report.html. The folder must be new, or have been made by an earlier demo, which is then replaced.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octjepa.errors import UsageError, counted
from octjepa.locks import LOCK, writer_lock

if TYPE_CHECKING:
    from octjepa.recipe import Recipe
    from octjepa.store import Store

_PARTS = (
    *("phantom", "store", "segmented", "run", "packaged.parquet", "embeddings.parquet"),
    *("probe.json", "report.html", "demo.json"),
)
PACKAGED_ENCODER = "phantom-truth"
FLUIDS = ("intraretinal_fluid", "subretinal_fluid")
SEED = 2026  # a cohort on which no setting was chosen: those were tried on seed 0
PEOPLE_PER_MINUTE = 48
UPDATES_PER_MINUTE = 240  # at most: 1,200 in five minutes
FEWEST_UPDATES = 300  # with which the claims were measured (docs/demo.md); fewer only if fewer minutes are requested
AFTER_TRAINING = 0.7  # time of embedding, probes and report in times of that before: all go with the people
TIMING_SECONDS = 3.0  # for which updates are timed before the training
LESIONS = ("drusen", "intraretinal_fluid", "subretinal_fluid", "geographic_atrophy", "epiretinal_membrane")


@dataclass(frozen=True)
class Schedule:
    """How many updates the training takes, its seconds, and those of the stages after it, as expected before the
    run."""

    updates: int
    training_seconds: float
    after_seconds: float

    def describe(self, elapsed: float) -> str:
        """The message before the training, `elapsed` seconds after the demo began."""
        total = elapsed + self.training_seconds + self.after_seconds
        return (
            f"pretrain: {self.updates} updates on the training people, {_minutes(self.training_seconds)}; then "
            f"{_minutes(self.after_seconds)} for the other stages; {_minutes(total)} in all"
        )


@dataclass(frozen=True)
class PackagedSegmenter:
    """The packaged segmenter on synthetic eyes with known truth.

    eyes: number of scans. boundary_error_um: mean absolute error over eight boundaries and all measured A-scans.
    fluid_dice: of intraretinal and subretinal fluid together, all scans pooled; None if no scan has fluid.
    """

    eyes: int
    boundary_error_um: float
    fluid_dice: float | None
    page: str

    def describe(self) -> str:
        """One line for the terminal."""
        dice = "" if self.fluid_dice is None else f", fluid Dice {self.fluid_dice:.2f}"
        eyes = counted(self.eyes, "synthetic eye")
        return f"packaged segmenter, {eyes}: boundary error {self.boundary_error_um:.1f} um{dice}"


def segment_cohort(cohort: Path, out: Path) -> PackagedSegmenter:
    """Segments one eye with fluid per device of a phantom cohort and compares the result with the truth.

    Writes files and a page to `out`. Raises UsageError if the cohort has no eye.
    """
    import nibabel as nib

    from octjepa.phantom import SURFACES, read_truth
    from octjepa.report.segmented_scans import write_page
    from octjepa.tasks.segmenter.scan_segmentation import segment_sources

    with (cohort / "truth" / "eyes.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    with_fluid_first = sorted(rows, key=lambda row: not any(int(row[fluid]) for fluid in FLUIDS))
    eyes = {row["device"]: row for row in reversed(with_fluid_first)}
    scans = [cohort / row["filepath"].lstrip("/") for row in eyes.values()]
    segmented = segment_sources([str(scan) for scan in scans], out, ("nifti",))
    page = write_page(segmented, out)
    errors_um: list[np.ndarray] = []
    overlap = total = 0
    for scan in segmented.scans:
        row = next(row for row in eyes.values() if row["sop_instance_uid"] in scan.scan)
        truth = read_truth(cohort / "truth" / f"{row['sop_instance_uid']}.npz")
        with np.load(scan.files["boundaries"]) as arrays:
            predicted_rows, names = arrays["rows"], arrays["names"].tolist()
        true_rows = truth.surfaces_px[[SURFACES.index(name) for name in names]]  # [boundary, slice, column]
        error = np.abs(predicted_rows - true_rows) * 1000 * scan.spacing_mm[1]
        errors_um.append(error[np.isfinite(error)])
        # NIfTI axes are column, depth, slice; classes 1 and 2 are the two kinds of fluid.
        classes = np.asarray(nib.Nifti1Image.from_filename(scan.files["classes"]).dataobj).transpose(2, 1, 0)
        predicted = (classes == 1) | (classes == 2)
        true = np.zeros_like(predicted)
        for fluid in FLUIDS:
            if fluid in truth.masks:
                true |= truth.masks[fluid]
        overlap += int((predicted & true).sum())
        total += int(predicted.sum()) + int(true.sum())
    if not errors_um:
        raise UsageError(f"no scan of {cohort} could be segmented: {page} says why")
    error_um = float(np.concatenate(errors_um).mean())
    return PackagedSegmenter(len(errors_um), error_um, 2 * overlap / total if total else None, str(page))


def choose_schedule(minutes: float, elapsed: float, update_seconds: float, packaged_seconds: float = 0.0) -> Schedule:
    """The longest training that lets the demo end after `minutes`, if that is possible.

    `elapsed`: seconds of all stages so far, of which `packaged_seconds` for the packaged models; `update_seconds`: of
    one update. A fast machine makes at most `UPDATES_PER_MINUTE`. A slow machine makes at least `FEWEST_UPDATES`,
    whatever time that takes, unless `minutes` asks for a shorter demo.
    """
    most = round(UPDATES_PER_MINUTE * minutes)
    after = AFTER_TRAINING * (elapsed - packaged_seconds)
    fitting = int((60 * minutes - elapsed - after) / update_seconds)
    updates = max(min(FEWEST_UPDATES, most), min(most, fitting))
    return Schedule(updates, updates * update_seconds, after)


def time_update(recipe: Recipe, store: Store) -> float:
    """Seconds of one update of `recipe` on this machine, from a few that are thrown away."""
    from octjepa.train.data import choose_cohort
    from octjepa.train.plan import time_run

    _, dataset = choose_cohort(store, recipe)
    return float(time_run(recipe, dataset, 1, TIMING_SECONDS).seconds_per_update)


def run_demo(out: Path, minutes: float) -> dict[str, Any]:
    """Phantom cohort -> ingest -> pretrain -> embed -> probe -> report in `out`; returns the verb's JSON."""
    with writer_lock(out):
        return _run_demo(out, minutes)


def _run_demo(out: Path, minutes: float) -> dict[str, Any]:
    started = time.perf_counter()
    _clear(out)
    from octjepa.ingest import build_store
    from octjepa.machine import cores
    from octjepa.phantom import CohortDesign, write_cohort
    from octjepa.store import Store

    workers = cores()
    people = round(PEOPLE_PER_MINUTE * minutes)
    _print_stage(f"1/7 phantom: {people} synthetic people, both eyes, four devices, as DICOM")
    cohort = out / "phantom"
    write_cohort(
        cohort, people, seed=SEED, split_shares=(0.6, 0.1, 0.3), workers=workers, design=CohortDesign(broken=6)
    )

    from octjepa.config import load_recipe

    recipe = load_recipe("tiny_cpu")
    _print_stage("2/7 ingest: every file is stored, or refused with a reason")
    build_store([str(cohort)], out / "store", recipe.preprocessing, workers=workers)
    store = Store.open(out / "store")

    from octjepa.embed.embedding import embed_store
    from octjepa.embed.table import read_embeddings
    from octjepa.encoders.pooling import DEFAULT_POOL
    from octjepa.evaluate.probe import ProbeSettings, run_probes
    from octjepa.report import write_report
    from octjepa.train.loop import pretrain

    packaged_started = time.perf_counter()
    _print_stage("3/7 packaged models: layers and fluid of an eye per device, embeddings of every eye")
    segmenter = segment_cohort(cohort, out / "segmented")
    _print_stage(segmenter.describe())
    embed_store(PACKAGED_ENCODER, store, out / "packaged.parquet", [DEFAULT_POOL])
    packaged_seconds = time.perf_counter() - packaged_started

    update_seconds = time_update(recipe, store)
    elapsed = time.perf_counter() - started
    schedule = choose_schedule(minutes, elapsed, update_seconds, packaged_seconds)
    _print_stage(f"4/7 {schedule.describe(elapsed)}")
    recipe = load_recipe("tiny_cpu", [f"train.max_updates={schedule.updates}"])
    summary = pretrain(recipe, store, out / "run")
    _print_stage(f"5/7 embed: every eye, trained and untrained encoder; {_minutes(schedule.after_seconds)} left")
    embed_store(out / "run", store, out / "embeddings.parquet", [DEFAULT_POOL])
    _print_stage("6/7 probe: lesions of people that no training has seen")
    tables = [read_embeddings(out / name) for name in ("embeddings.parquet", "packaged.parquet")]
    # Encoders are pooled by zones, like the intensity baseline, so that like is compared with like.
    settings = ProbeSettings(pools=[DEFAULT_POOL], paired_pool=DEFAULT_POOL)
    probed = run_probes(tables, cohort / "truth" / "eyes.tsv", list(LESIONS), settings).payload()
    (out / "probe.json").write_text(json.dumps(probed, indent=1), encoding="utf-8")
    _print_stage("7/7 report: one HTML page")
    payload = {
        "report": str(out / "report.html"),
        "seconds": time.perf_counter() - started,
        "updates": schedule.updates,
        "segmenter": asdict(segmenter),
        "loss": summary.loss,
        "baseline_loss": summary.baseline_loss,
        "cosine": summary.cosine,
        "baseline_cosine": summary.baseline_cosine,
        "centred": summary.centred.to_json(),
        "probe": probed["rows"],
        "paired": probed["paired"],
    }
    (out / "demo.json").write_text(json.dumps(payload, indent=1), encoding="utf-8")
    write_report(out, out / "report.html")
    payload["seconds"] = time.perf_counter() - started
    return payload


_MARKER = ".octjepa-demo"


def _clear(out: Path) -> None:
    """An empty, marked folder. Raises UsageError rather than touch anything that no demo wrote."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: give --out a folder")
    if out.is_dir() and any(path.name != LOCK for path in out.iterdir()) and not (out / _MARKER).is_file():
        raise UsageError(f"{out} is not empty and was not made by a demo: give --out a new folder")
    for part in _PARTS:
        path = out / part
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARKER).touch()


def _minutes(seconds: float) -> str:
    """Such as "about 2.5 min", or "about 40 s"."""
    return f"about {seconds / 60:.1f} min" if seconds >= 60 else f"about {max(1, round(seconds))} s"


def _print_stage(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
