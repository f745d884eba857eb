"""Is a figure the encoder's, or that of the people who happen to be tested? The study's probe on other splits of them.

    python -m benchmarks.study.splits [--lesion drusen] [--splits 20] [--work DIR]

Deals the cohort's people anew (0.6 to learn from, 0.4 asked), fits the study's linear probe on frozen tokens of an
untrained encoder and of the one in the package, and prints AUROC for each deal, beside the study's own split and its
reverse. The encoder in the package saw its training people unlabelled, so its own rows are no held-out figures; the
untrained one has seen nobody. Some ten CPU-seconds a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from octjepa.checkpoint import PretrainedEncoder, load_encoder
from octjepa.cli.failures import exit_with_message
from octjepa.errors import UsageError
from octjepa.metrics.scores import weighted_auroc
from octjepa.phantom import LESIONS

from .cohort import Eyes
from .features import all_tokens, of_encoder, pooled, untrained
from .frozen import auroc_within, probe
from .plan import PRIMARY_POOL, RECIPE, SHIPPED

ROOT = Path(__file__).resolve().parents[2]
LEARN = 0.6  # share of the people, as in the study


def deals(eyes: Eyes, number: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, volumes to learn from, volumes asked): the study's split, its reverse, then `number` random ones."""
    train, test = eyes.rows("train"), eyes.rows("test")
    yield "train to test", train, test
    yield "test to train", test, train
    people = np.unique(eyes.people)
    for seed in range(number):
        chosen = np.random.default_rng(seed).permutation(people)[: round(LEARN * len(people))]
        learn = np.isin(eyes.people, chosen)
        yield f"deal {seed}", np.flatnonzero(learn), np.flatnonzero(~learn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lesion", choices=LESIONS, default="drusen")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--work", type=Path, default=ROOT / "study")
    given = parser.parse_args()
    cohorts = sorted(given.work.glob("cohort-*"))
    if not cohorts:
        raise UsageError(f"no cohort in {given.work}: `make study` draws it")
    torch.set_num_threads(1)
    eyes, lesion = Eyes.open(cohorts[0]), LESIONS.index(given.lesion)
    encoders: dict[str, PretrainedEncoder] = {"untrained": untrained(RECIPE, (), 0), SHIPPED: load_encoder(SHIPPED)}
    for name, encoder in encoders.items():
        features = pooled(all_tokens(of_encoder(encoder), eyes.store, eyes.ids))[PRIMARY_POOL]
        found = []
        for deal, learn, asked in deals(eyes, given.splits):
            scores = probe(features, eyes.people, eyes.labels[:, lesion], learn, asked).scores[:, 1]
            truth, once = eyes.labels[asked, lesion], np.ones((len(asked), 1))
            every = float(weighted_auroc(truth, scores, once)[0])
            within = float(auroc_within(truth, scores, eyes.devices[asked], once)[0])
            print(f"{name:<14} {deal:<14} AUROC {every:.3f}  within a vendor {within:.3f}", flush=True)
            if deal.startswith("deal"):
                found.append((every, within))
        if found:
            low, mean, high = (part(found, axis=0) for part in (np.min, np.mean, np.max))
            told = [f"{mean[k]:.3f} [{low[k]:.3f}, {high[k]:.3f}]" for k in range(2)]
            print(f"{name:<14} over the deals: AUROC {told[0]}, within a vendor {told[1]}", flush=True)


if __name__ == "__main__":
    with exit_with_message(lambda: None):
        main()
