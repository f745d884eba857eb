"""Embedding against a script that takes one volume at a time, and against a ViT-L that is applied to every B-scan.

`single`: both load `phantom-tiny`, read every volume of a store, take it through the trained and the untrained network
and the intensity histogram, and write one parquet file. Ours takes batches, hashes weights and contents, writes parts
that survive a kill and looks for people whom the encoder was trained on.

`vit_large`: networks alone, tokens of every volume. The other is the network of RETFound with random weights, for what
it computes does not depend on them: 224 x 224 pixels and 197 tokens a B-scan, 303 M parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
from benchmarks.peers.alternating_runs import Comparison, rate
from benchmarks.peers.data import phantom_store

from octjepa.distributed.runtime import Runtime
from octjepa.embed.embedding import embed_store
from octjepa.embed.shard import intensity_histogram
from octjepa.encoders import load_encoder
from octjepa.encoders.external.published import PUBLISHED, PublishedEncoder
from octjepa.encoders.external.vit import VisionTransformer, ViTShape
from octjepa.encoders.pooling import POSITION_FREE_POOL
from octjepa.store import Store
from octjepa.views import geometry

ENCODER = "phantom-tiny"
POOL = POSITION_FREE_POOL


def one_by_one(store: Store, out: Path) -> int:
    """What a script would do; returns how many volumes it embedded."""
    device = Runtime("fp32").device
    encoder = load_encoder(ENCODER).to(device)
    untrained = encoder.untrained().to(device)
    rows = []
    for name in store.table["volume_id"]:
        volume = store.read(name)
        row = {"volume_id": name, "histogram": intensity_histogram(volume, encoder.recipe.preprocessing)}
        rows.append(row | {"vector": encoder.embed(volume, POOL), "untrained": untrained.embed(volume, POOL)})
    pd.DataFrame(rows).to_parquet(out)
    return len(rows)


@contextmanager
def compare_with_single() -> Iterator[Comparison]:
    """`octjepa embed` and the script on one phantom store, in volumes a second."""
    preprocessing = load_encoder(ENCODER).recipe.preprocessing
    with phantom_store(preprocessing) as (work, store):

        def ours() -> int:
            return int(embed_store(ENCODER, store, work / "ours.parquet", [POOL]).rows)

        setup = {
            "encoder": ENCODER,
            "volumes": len(store.table),
            "device": str(Runtime("fp32").device),
            "threads": torch.get_num_threads(),
        }
        yield Comparison(rate(ours), rate(lambda: one_by_one(store, work / "other.parquet")), setup)


@contextmanager
def compare_with_vit_large(volumes: int = 1) -> Iterator[Comparison]:
    """Tokens of a few volumes by `phantom-tiny`, and by a ViT-L/16 on every B-scan, in volumes a second."""
    device = Runtime("fp32").device
    encoder = load_encoder(ENCODER).to(device)
    size = encoder.recipe.preprocessing.image_size
    published = PUBLISHED["retfound"]
    width, (depth, heads) = next(iter(published.sizes.items()))
    shape = ViTShape(width, depth, heads, 4 * width, 3, published.patch, published.grid)
    about = {"encoder": published.title, "weights": "random"}
    other = PublishedEncoder(VisionTransformer(shape).eval(), about, Path("random"), published).to(device)
    with phantom_store(encoder.recipe.preprocessing) as (_, store):
        read = [store.read(name) for name in store.table["volume_id"][:volumes]]
        crop = geometry.center_crop(encoder.recipe.preprocessing)
        views = [geometry.apply_transform(volume.pixels, crop, size) for volume in read]

        def ours() -> int:
            return len(list(encoder.encode_volumes(read)))

        def theirs() -> int:
            return len([other.tokens(view) for view in views])

        setup = {"encoder": ENCODER, "other": published.title, "volumes": volumes, "image_size": list(size)}
        yield Comparison(rate(ours), rate(theirs), setup)
