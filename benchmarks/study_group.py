"""Is the study group, whose effect on the pixels is known, found again: phantom -> ingest -> embed -> probe?

    OMP_NUM_THREADS=1 python benchmarks/study_group.py --out benchmarks/records/study_group.json

For each effect a cohort of realistic lesions is drawn in which the study group adds `effect` times the usual to the
burden of disease (`octjepa phantom --group-effect`), ingested, embedded with phantom-tiny and probed for `study_group`
(four classes) and for `treated` (its two upper classes against its two lower ones). `oracle` is the same linear probe
on the lesions that were drawn: the most that pixels can tell. `shuffled` is the same with the groups shuffled among
the people. 150 seconds an effect on one core.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import octjepa
from octjepa.embed.embedding import embed_store
from octjepa.embed.table import Embeddings, read_embeddings
from octjepa.evaluate.probe import ProbeSettings, run_probes
from octjepa.ingest import build_store
from octjepa.phantom import LESIONS, CohortDesign, write_cohort
from octjepa.store import Store

ENCODER = "phantom-tiny"
DEVICES = ("topcon_maestro2", "topcon_triton", "zeiss_cirrus")
SHARES = (0.5, 0.1, 0.4)
TARGETS = ("study_group", "treated")
PRIMARY = ("auroc", "auroc_ovr")
CHANCE = 0.5


def decode_labels(cohort: Path, out: Path, shuffled: int | None = None) -> Path:
    """participants.tsv with `treated`; with a seed, the groups shuffled among the people."""
    people = pd.read_csv(cohort / "participants.tsv", sep="\t", dtype=str)
    if shuffled is not None:
        people["study_group"] = np.random.default_rng(shuffled).permutation(people["study_group"].to_numpy())
    people["treated"] = people["study_group"].str.contains("medication|insulin").astype(int)
    people.to_csv(out, sep="\t", index=False)
    return out


def with_truth(table: Embeddings, cohort: Path) -> Embeddings:
    """The table with the lesions that were drawn in each eye in the place of the encoder's features."""
    drawn = pd.read_csv(cohort / "truth" / "eyes.tsv", sep="\t", dtype={"person_id": str}).set_index(
        ["person_id", "eye"]
    )
    keys = list(zip(table.frame["person_id"], table.frame["eye"], strict=True))
    vector = drawn.loc[keys, list(LESIONS)].to_numpy(np.float32)
    return Embeddings(
        table.frame,
        vector,
        np.zeros_like(vector),
        table.histogram,
        len(LESIONS),
        "oracle",
        table.contract,
        0,
        ("mean",),
    )


def probed(table: Embeddings, labels: Path, work: Path) -> dict[str, Any]:
    pools = [pool for pool in ("mean", "mean_std_max") if pool == "mean" or table.encoder != "oracle"]
    settings = ProbeSettings(["linear"], pools=pools, level="person")
    return run_probes([table], labels, TARGETS, settings, ledger_folder=work / "uses").payload()


def primary(result: dict[str, Any], names: tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    retained = ("name", "target", "pool", "metric", "value", "low", "high", "n_people")
    rows = [row for row in result["rows"] if row["metric"] in PRIMARY and row["target"] in TARGETS]
    return [{key: _short(row[key]) for key in retained} for row in rows if names is None or row["name"] in names]


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def one_effect(effect: float, people: int, seed: int, work: Path) -> dict[str, Any]:
    cohort = work / f"cohort-{effect:g}"
    write_cohort(
        cohort,
        people,
        seed,
        DEVICES,
        split_shares=SHARES,
        design=CohortDesign(difficulty="realistic", group_effect=effect),
    )
    preprocessing = octjepa.load_encoder(ENCODER).recipe.preprocessing
    build_store([str(cohort)], work / f"store-{effect:g}", preprocessing, workers=1)
    embed_store(ENCODER, Store.open(work / f"store-{effect:g}"), work / f"{effect:g}.parquet")
    table = read_embeddings(work / f"{effect:g}.parquet")
    labels, shuffled = decode_labels(cohort, work / "labels.tsv"), decode_labels(cohort, work / "shuffled.tsv", seed)
    found, chance = probed(table, labels, work), probed(table, shuffled, work)
    intervals = [row for row in primary(chance) if row["low"] is not None]
    return {
        "group_effect": effect,
        "rows": primary(found) + primary(probed(with_truth(table, cohort), labels, work), ("oracle",)),
        "minus_untrained": [
            {key: _short(one[key]) for key in ("target", "pool", "metric", "difference", "low", "high", "n_people")}
            for one in found["comparisons"]
            if one["target"] in TARGETS
        ],
        "shuffled": {
            "intervals": len(intervals),
            "without_chance": [row for row in intervals if not row["low"] <= CHANCE <= row["high"]],
        },
        "faults": found["faults"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=400)
    parser.add_argument("--seed", type=int, default=2027)
    parser.add_argument("--effects", default="1,4,12")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as work:
        effects = [one_effect(float(text), given.people, given.seed, Path(work)) for text in given.effects.split(",")]
    about = {"encoder": ENCODER, "people": given.people, "seed": given.seed, "devices": DEVICES, "shares": SHARES}
    result_value = {
        "command": "python benchmarks/study_group.py",
        **about,
        "difficulty": "realistic",
        "effects": effects,
    }
    given.out.write_text(json.dumps(result_value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
