"""What one B-scan per eye costs against the whole volume, on phantoms, with a frozen encoder.

`python -m benchmarks.single_bscans --work WORK [--encoder NAME] [--people N]` draws a cohort of the exam's difficulty,
saves the middle B-scan of each scan as a PNG, and ingests the cohort three times: whole volumes, B-scans with their
spacing stated in the manifest, and B-scans without a spacing. The encoder embeds each store, and linear probes learn
which eyes have each lesion. It prints one JSON object: AUROC on test eyes by lesion, tokens per eye, and CPU seconds of
ingest and embedding.

A lesion away from the middle B-scan cannot be seen in it. The difference includes that.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from octjepa.embed.embedding import embed_store
from octjepa.embed.table import read_embeddings
from octjepa.encoders import load_encoder
from octjepa.evaluate.probe import ProbeSettings, run_probes
from octjepa.ingest import IngestOptions, build_store
from octjepa.phantom import LESIONS
from octjepa.phantom.cohort import CohortDesign, write_cohort
from octjepa.read.reader import read_volume
from octjepa.store import Store

_DEVICES = ("heidelberg_spectralis", "topcon_triton")
_SHARES = (0.6, 0.1, 0.3)


def _truth(cohort: Path) -> Iterator[dict[str, str]]:
    with (cohort / "truth" / "eyes.tsv").open() as file:
        yield from csv.DictReader(file, delimiter="\t")


def write_pictures(cohort: Path, out: Path, states_spacing: bool) -> None:
    """Writes the middle B-scan of each scan of `cohort` as a PNG, with a manifest and the table of people."""
    out.mkdir(parents=True)
    rows = ["person_id\tlaterality\tpixel_spacing\tfilepath"]
    for eye in _truth(cohort):
        scan = read_volume(cohort / eye["filepath"].lstrip("/"))
        name = f"{eye['person_id']}_{eye['eye']}.png"
        Image.fromarray(scan.pixels[scan.shape[0] // 2]).save(out / name)
        spacing = f"{scan.spacing_mm[1]}, {scan.spacing_mm[2]}" if states_spacing else ""
        rows.append(f"{eye['person_id']}\t{eye['eye']}\t{spacing}\t{name}")
    (out / "manifest.tsv").write_text("\n".join(rows) + "\n")
    (out / "participants.tsv").write_text((cohort / "participants.tsv").read_text())


def measure(source: Path, work: Path, encoder: str, labels: Path, is_bscans: bool) -> dict[str, Any]:
    """Ingests and embeds `source`, and probes each lesion: AUROC, tokens per eye, CPU seconds."""
    recipe = load_encoder(encoder).recipe
    options = IngestOptions(bscan_slices=recipe.tokens.patch_size[0] if is_bscans else 0)
    started = time.process_time()
    build_store([source], work / "store", recipe.preprocessing, options=options)
    ingested = time.process_time()
    made = embed_store(encoder, Store.open(work / "store"), work / "eyes.parquet")
    embedded = time.process_time()
    settings = ProbeSettings(probes=("linear",), task="binary", level="eye", metrics=("auroc",), bootstrap=200)
    table = read_embeddings(work / "eyes.parquet")
    result = run_probes([table], labels, tuple(LESIONS), settings, ledger_folder=work / "uses")
    pool = table.pools[0]
    auroc: dict[str, dict[str, float | None]] = {}
    for row in result.rows:
        if row.metric == "auroc" and row.pool in (pool, ""):
            auroc.setdefault(row.name, {})[row.target] = None if row.value is None else round(row.value, 3)
    return {
        "eyes": made.rows,
        "test_people": max((row.n_people or 0 for row in result.rows), default=0),
        "tokens": made.tokens_per_volume["median"],
        "ingest_cpu_seconds": round(ingested - started, 1),
        "embed_cpu_seconds": round(embedded - ingested, 1),
        "auroc": auroc,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--encoder", default="phantom-tiny")
    parser.add_argument("--people", type=int, default=150)
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    work, cohort = options.work, options.work / "cohort"
    if not cohort.is_dir():
        design = CohortDesign(difficulty="exam")
        write_cohort(cohort, options.people, options.seed, _DEVICES, split_shares=_SHARES, design=design)
    labels = cohort / "truth" / "eyes.tsv"
    result = {"volume": measure(cohort, work / "volume", options.encoder, labels, is_bscans=False)}
    for name, states_spacing in (("bscan", True), ("bscan_without_spacing", False)):
        write_pictures(cohort, work / "pictures" / name, states_spacing)
        result[name] = measure(work / "pictures" / name, work / name, options.encoder, labels, is_bscans=True)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
