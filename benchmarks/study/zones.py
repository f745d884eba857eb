"""The same frozen tokens, read by where in the eye they lie: how much of a row is the encoder, how much the reading?

    python -m benchmarks.study.zones [--work DIR] [--out DIR]

For each run whose encoder is in the work folder, and for untrained encoders, the study's linear probe reads
`mean_std_max` and `zones` (`octjepa.checkpoint.pooling`) of the same tokens. Beside them stands `intensity`: the
mean, the spread and two percentiles of each of the same patches, pooled likewise, which no network has touched. Written
to docs/study/zones.json as each row ends, and shown in docs/study/zones.md. A repeated call goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from octjepa.checkpoint import load_encoder
from octjepa.checkpoint.pooling import TokenFeatures, pool_tokens
from octjepa.cli.failures import exit_with_message
from octjepa.config import load_recipe
from octjepa.embed.shard import patch_intensity
from octjepa.errors import UsageError
from octjepa.files import write_atomic, write_json, writer_lock
from octjepa.metrics.bootstrap import Estimate
from octjepa.phantom import LESIONS
from octjepa.progress import bar
from octjepa.train.run_folder import data_hash

from . import frozen
from .aims import MACRO
from .cohort import Eyes
from .features import Tokens, all_tokens, of_encoder, of_pixels, untrained
from .one import measuring_hash
from .pairs import figure
from .plan import ARMS, RECIPE, Settings, main_entries
from .results import Results, row, spread

ROOT = Path(__file__).resolve().parents[2]
POOLS = ("mean_std_max", "zones")
FLOOR = "intensity"


class Job(NamedTuple):
    """One row of one seed: its name in the table, the seed, and what makes the tokens of all eyes."""

    arm: str
    seed: int
    tokens: Callable[[], list[Tokens]]

    @property
    def key(self) -> str:
        return f"{self.arm.replace(':', '-')}-{self.seed}"


def jobs(eyes: Eyes, runs: Path, results: Results) -> Iterator[Job]:
    """Intensity, untrained encoders, the main rows, and finalists of the ablations where there are any."""

    def read(encoder: Any) -> list[Tokens]:
        return all_tokens(of_encoder(encoder), eyes.store, eyes.ids)

    yield Job(FLOOR, 0, lambda: intensities(eyes))
    for entry in main_entries(Settings()):
        if entry.kind == "untrained":
            yield Job(entry.arm, entry.seed, lambda e=entry: read(untrained(RECIPE, e.overrides, e.seed)))  # type: ignore[misc]
    for run, about in sorted(results.runs.items()):
        if about.get("kind") == "pretrain" and about["group"] in ("main", "finalist") and (runs / run / "run").is_dir():
            one = next(one for one in results.rows if one["run"] == run)
            yield Job(one["arm"], one["seed"], lambda run=run: read(load_encoder(runs / run / "run")))  # type: ignore[misc]


def intensities(eyes: Eyes) -> list[Tokens]:
    """The statistics of each selected patch, as `octjepa embed` takes them.

    One eye after the other: the patches of all do not fit into memory.
    """
    cut = of_pixels(load_recipe(RECIPE))
    found = (one for volume_id in eyes.ids for one in cut([eyes.store.read(volume_id)]))
    return [Tokens(patch_intensity(one.features), one.index) for one in found]


def pooled(found: list[Tokens], grid: tuple[int, int, int], pool: str) -> np.ndarray:
    """[volumes, features]."""
    none, whole = np.zeros(0, np.int64), np.ones(0, np.float32)
    return np.stack([pool_tokens(TokenFeatures(one.features.astype(np.float32), one.index, grid, whole), none, (pool,))
                     for one in found])  # fmt: skip


def measure(job: Job, eyes: Eyes, folder: Path, bootstrap: int) -> dict[str, Any]:
    """Figures of both readings; the bootstrap copies go to `folder`."""
    rows: list[dict[str, Any]] = []
    found = job.tokens()
    for pool in POOLS:
        name = f"{job.arm}:{pool}"

        def say(metric: str, *figures: Any, name: str = name) -> None:
            rows.append(row(name, job.seed, metric, *figures, run=job.key))  # type: ignore[misc]

        bench = frozen.Bench(eyes, say, bootstrap)
        features = pooled(found, load_recipe(RECIPE).grid, pool)
        frozen.say_lesions(bench, *frozen.lesion_scores(bench, features))
        frozen.say_vendor_and_fovea(bench, features)
        copies = dict(bench.copies)
        path = folder / f"{job.key}-{pool}.npz"
        write_atomic(path, lambda file, copies=copies: np.savez(file, allow_pickle=False, **copies))  # type: ignore[misc]
    return {"arm": job.arm, "seed": job.seed, "measured_by": measuring_hash(), "rows": rows}


def differences(entries: dict[str, Any], folder: Path, people: int, eyes_hash: str) -> list[dict[str, Any]]:
    """Rows read alike, one less the other, seed by seed, with the interval of people and seeds."""
    rows = [one for entry in entries.values() for one in entry["rows"] if one["metric"] == MACRO]

    def estimates(arm: str, pool: str) -> dict[int, Estimate]:
        found = {}
        for one in rows:
            if one["arm"] == f"{arm}:{pool}":
                with np.load(folder / f"{one['run']}-{pool}.npz", allow_pickle=False) as file:
                    copies = file[MACRO].astype(np.float64)
                found[one["seed"]] = Estimate(one["value"], copies, one["n"], people, eyes_hash, eyes_hash, "share")
        return found

    arms = _in_order(entries)
    trained = [arm for arm in arms if arm not in (FLOOR, "untrained")]
    versus = [(arm, "untrained") for arm in trained] + [(arm, FLOOR) for arm in ("untrained", *trained)]
    versus += [("vjepa", arm) for arm in ARMS[1:]]
    told = []
    for ours, theirs in versus:
        for pool in POOLS:
            mine, others = estimates(ours, pool), estimates(theirs, pool)
            if theirs == FLOOR:
                others = dict.fromkeys(mine, others[0])  # it is without chance
            seeds = sorted(set(mine) & set(others))
            if seeds:
                values = [mine[seed].value - others[seed].value for seed in seeds]
                found = figure([mine[seed] for seed in seeds], [others[seed] for seed in seeds])
                told.append({"row": ours, "minus": theirs, "pool": pool, "values": values,
                             "low": found["recipe_low"], "high": found["recipe_high"]})  # fmt: skip
    return told


def _in_order(entries: dict[str, Any]) -> list[str]:
    """The arms: what needs no training first, finalists last."""
    order = (FLOOR, "untrained", *ARMS)
    arms = {entry["arm"] for entry in entries.values()}
    return [arm for arm in order if arm in arms] + sorted(arms - set(order))


def page(kept: dict[str, Any]) -> str:
    """Both readings of every row, each lesion, and differences between rows read alike."""
    rows = [one for entry in kept["entries"].values() for one in entry["rows"]]
    metrics = [*_COLUMNS, *(f"lesion_auroc_{name}" for name in LESIONS)]
    heads = ["row", "read by", *_COLUMNS.values(), *(name.replace("_", " ") for name in LESIONS)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for arm in _in_order(kept["entries"]):
        for pool in POOLS:
            name = f"{arm}:{pool}"
            found = [[one["value"] for one in rows if (one["arm"], one["metric"]) == (name, each)] for each in metrics]
            lines.append(f"| {arm} | `{pool}` | " + " | ".join(map(spread, found)) + " |")
    cells: dict[str, dict[str, str]] = {}
    for one in kept["differences"]:
        sure = "" if one["low"] is None or one["high"] is None else f" ({one['low']:.3f} to {one['high']:.3f})"
        cells.setdefault(f"{one['row']} minus {one['minus']}", {})[one["pool"]] = (
            spread(one["values"], sign=True) + sure
        )
    told = ["| lesion AUROC of test people | " + " | ".join(f"`{pool}`" for pool in POOLS) + " |", "|---|---|---|"]
    told += [f"| {name} | " + " | ".join(said[pool] for pool in POOLS) + " |" for name, said in cells.items()]
    return _TEXT.format(table="\n".join(lines), differences="\n".join(told))


_COLUMNS = {
    MACRO: "test", f"{MACRO}{frozen.OF_VAL}": "validation", f"{MACRO}{frozen.WITHIN}": "within a vendor",
    "vendor_accuracy": "vendor readable", "fovea_error_mm": "fovea, mm",
}  # fmt: skip
_TEXT = """# The same tokens, read by where they lie

Written by `python -m benchmarks.study.zones` from `zones.json`; do not edit. AUROC of lesions by linear probes on the
eyes of the study, mean over seeds [lowest, highest]. `mean_std_max`, which the study named before it saw a figure,
weighs all tokens of an eye alike; `zones` keeps a mean and a maximum for each of sixteen places, eight bands of depth
times the middle of the scan and the rest. `intensity` is no network: mean, spread, 5th and 95th percentile of the grey
of each of the same patches. `zones` was found on training and validation people ([lab log](../../lab/LOG.md)).

{table}

Differences of rows that are read alike, seed by seed [lowest, highest], in parentheses the 95 % interval of people and
seeds:

{differences}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "study")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "study")
    given = parser.parse_args()
    cohorts = sorted(given.work.glob("cohort-*"))
    if not cohorts:
        raise UsageError(f"no cohort in {given.work}: `make study` draws it")
    torch.set_num_threads(1)
    eyes, settings = Eyes.open(cohorts[0]), Settings()
    kept, folder = given.out / "zones.json", given.work / "zones"
    folder.mkdir(exist_ok=True)
    with writer_lock(folder):
        before = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {"entries": {}}
        entries: dict[str, Any] = before["entries"]
        wanted = list(jobs(eyes, given.work / "runs", Results(given.out)))
        with bar("read by zones", len(wanted), "rows") as shown:
            for job in wanted:
                done = entries.get(job.key, {}).get("measured_by") == measuring_hash()
                if not done or not (folder / f"{job.key}-{POOLS[-1]}.npz").is_file():
                    entries[job.key] = measure(job, eyes, folder, settings.bootstrap)
                    write_json(kept, {**before, "entries": entries})
                shown.advance()
        entries = {job.key: entries[job.key] for job in wanted}
        people = len(set(eyes.people[eyes.rows("test")]))
        found = {
            "entries": entries,
            "differences": differences(entries, folder, people, data_hash(eyes.store, eyes.ids)),
        }
        write_json(kept, found)
        write_atomic(given.out / "zones.md", lambda file: file.write(page(found).encode()))
    return 0


if __name__ == "__main__":
    with exit_with_message(lambda: None):
        sys.exit(main())
