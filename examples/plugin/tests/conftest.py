"""An embedding table of made-up people: features know the lesion and the age."""

import numpy as np
import pandas as pd
import pytest

from octjepa.embed.table import TableFacts, write_embeddings


@pytest.fixture
def table(tmp_path):
    """`eyes.parquet`, and `labels.tsv` beside it; 126 people, an eye each."""
    rng = np.random.default_rng(0)
    people = np.arange(126)
    lesion, age = people % 2, rng.normal(60, 9, len(people))
    features = rng.normal(size=(len(people), 12)).astype(np.float32)
    features[:, 0] += 3 * lesion
    features[:, 1] = age / 10
    frame = pd.DataFrame(
        {
            "person_id": [f"P{number:03d}" for number in people],
            "eye": "OD",
            "volume_id": [f"{number:016x}" for number in people],
            "content_hash": [f"{number:064x}" for number in people],
            "device": "one",
            "split": np.array(["train", "val", "test"])[people // 42],
            "age": age,
            "clinical_site": "A",
            "vector": list(features),
            "untrained": list(rng.normal(size=features.shape).astype(np.float32)),
            "histogram": list(rng.random((len(people), 4)).astype(np.float32)),
        }
    )
    pd.DataFrame({"person_id": frame["person_id"], "lesion": lesion}).to_csv(
        tmp_path / "labels.tsv", sep="\t", index=False
    )
    return write_embeddings(tmp_path / "eyes.parquet", frame, TableFacts(4, "made-up", "c" * 64))
