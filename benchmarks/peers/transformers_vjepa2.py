"""The same network by the V-JEPA 2 classes of Hugging Face's transformers: trained a step, and embedding.

Theirs knows whole videos on square grids, so both sides take every patch of the grid, with tiled rotary positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.peers.alternating_runs import Comparison, rate
from benchmarks.peers.data import WHOLE_GRID, bench_recipe, phantom_store, random_batch
from benchmarks.peers.step import UPDATES, Work, comparison, plain_adamw, plain_step, update_of
from jaxtyping import Float, Int
from torch import Tensor

from octjepa.distributed.precision import wait_for
from octjepa.distributed.runtime import Runtime
from octjepa.encoders import PretrainedEncoder
from octjepa.errors import OctjepaError, UsageError, install_command
from octjepa.model import VJEPA3D
from octjepa.model.vjepa2 import to_vjepa2, vjepa2_config
from octjepa.objectives.base import gather_tokens
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.views import geometry, intensity
from octjepa.volume import CanonicalVolume

BATCH = 16
ALIKE = 1e-3  # the most that features of the same weights may differ by; they are of size 1


def import_transformers() -> Any:
    """Raises UsageError where it is not installed."""
    try:
        return import_module("transformers")
    except ImportError:
        raise UsageError(f"the peer transformers needs transformers: {install_command('hf')}") from None


def vjepa2_model(recipe: Recipe, model: VJEPA3D) -> Any:
    """A `VJEPA2Model` of the size of `model`, with the weights of its target encoder.

    Raises UsageError where transformers is not installed.
    """
    transformers = import_transformers()
    size, encoder = recipe.model.encoder_size, model.target_encoder
    config = vjepa2_config(encoder, recipe.tokens.patch_size, recipe.grid) | {
        "pred_hidden_size": size.predictor_width,
        "pred_num_hidden_layers": size.predictor_depth,
        "pred_num_attention_heads": size.predictor_heads,
        "pred_num_mask_tokens": 1,
    }
    theirs = transformers.VJEPA2Model(transformers.VJEPA2Config(**config))
    theirs.load_state_dict(to_vjepa2(encoder, recipe.tokens.patch_size), strict=False)  # the predictor keeps its own
    return theirs


# -- a training step --


Predict = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # (student, video, context, hidden) -> features of hidden


def step_by_vjepa2(recipe: Recipe, predict: Predict | None = None) -> Work:
    """A student's prediction of hidden patches, by L1 to the layer-normed features of a teacher.

    `predict` is `predicted_features` unless it is given. `VJEPA2Model.forward` would show the student the whole video
    (`predicted_as_shipped`), which is no V-JEPA training.
    """
    runtime, predict = Runtime(recipe.train.precision), predict or predicted_features
    student = vjepa2_model(recipe, VJEPA3D.from_recipe(recipe)).to(runtime.device).train()
    teacher = copy.deepcopy(student.encoder).requires_grad_(False)
    optimizer = plain_adamw(student, recipe.train)
    batch = random_batch(recipe)
    d, h, w = recipe.preprocessing.image_size
    videos = torch.randn(2, recipe.train.global_batch, d, 1, h, w)

    def work() -> int:
        for _ in range(UPDATES):
            seen, whole = videos.to(runtime.device, non_blocking=True)
            context, hidden = batch.context.to(runtime.device), batch.target.to(runtime.device)
            with runtime.autocast():
                predicted = predict(student, seen, context, hidden)
                with torch.no_grad():
                    truth = teacher(pixel_values_videos=whole).last_hidden_state.float()
            width = truth.shape[-1]
            F.l1_loss(predicted.float(), gather_tokens(F.layer_norm(truth, (width,)), hidden)).backward()
            plain_step(student, optimizer, teacher, student.encoder, recipe.train)
        wait_for(runtime.device)
        return UPDATES * recipe.train.global_batch

    return work


def predicted_as_shipped(
    student: Any, video: Float[Tensor, "b d 1 h w"], context: Int[Tensor, "b n"], hidden: Int[Tensor, "b m"]
) -> Float[Tensor, "b m w"]:
    """`VJEPA2Model.forward` as it is: the student sees the whole video, its predictor what it is given of that."""
    outcome = student(pixel_values_videos=video, context_mask=[context], target_mask=[hidden])
    predicted: Tensor = outcome.predictor_output.last_hidden_state
    return predicted


def predicted_features(
    student: Any, video: Float[Tensor, "b d 1 h w"], context: Int[Tensor, "b n"], hidden: Int[Tensor, "b m"]
) -> Float[Tensor, "b m w"]:
    """Their predictor's features of the hidden patches, from the context's alone."""
    features = context_features(student.encoder, video, context)
    index = context.unsqueeze(-1).expand_as(features)
    tokens = context.shape[1] + hidden.shape[1]
    whole = features.new_zeros(len(features), tokens, features.shape[2]).scatter(1, index, features)
    predicted: Tensor = student.predictor(whole, [context], [hidden]).last_hidden_state
    return predicted


def context_features(
    encoder: Any, video: Float[Tensor, "b d 1 h w"], context: Int[Tensor, "b n"]
) -> Float[Tensor, "b n w"]:
    """Their student's features of the context patches, which see no other patch."""
    features = gather_tokens(encoder.embeddings(video), context)
    for layer in encoder.layer:
        features = layer(features, context)[0]
    normed: Tensor = encoder.layernorm(features)
    return normed


@contextmanager
def step_against_transformers() -> Iterator[Comparison]:
    """An update of every patch by both."""
    recipe = bench_recipe(*WHOLE_GRID, "model.positions=rope_tiled")
    theirs = step_by_vjepa2(recipe)
    yield comparison(update_of(recipe), theirs, recipe)


@contextmanager
def step_against_shipped(name: str | None = None) -> Iterator[Comparison]:
    """Ours with the tokens that its recipe chooses, theirs with every patch: what either user would run.

    Ours is the recipe of the other comparisons, or a shipped one by `name`: as many volumes, width and depth alike.
    """
    theirs = step_by_vjepa2(bench_recipe(*WHOLE_GRID, "model.positions=rope_tiled"), predicted_as_shipped)
    recipe = bench_recipe(name=name)
    yield comparison(update_of(recipe), theirs, recipe)


# -- embedding --


@contextmanager
def embed_against_transformers() -> Iterator[Comparison]:
    """Features of every patch, fp32, a batch at a time from the store. Raises OctjepaError where they are not alike."""
    recipe = bench_recipe(*WHOLE_GRID, "model.positions=rope_tiled")
    runtime = Runtime("fp32")
    torch.manual_seed(0)
    model = VJEPA3D.from_recipe(recipe)
    theirs = vjepa2_model(recipe, model).to(runtime.device).eval()
    encoder = PretrainedEncoder(model.target_encoder, recipe, "bench").to(runtime.device)
    with phantom_store(recipe.preprocessing) as (_, store):
        ids = store.table["volume_id"].tolist()

        def ours(names: Sequence[str]) -> Float[np.ndarray, "b t w"]:
            return np.stack([one.features for one in encoder.encode_volumes([store.read(name) for name in names])])

        @torch.no_grad()
        def other(names: Sequence[str]) -> Float[np.ndarray, "b t w"]:
            videos = _videos(store, names, recipe).to(runtime.device)
            features = theirs(pixel_values_videos=videos, skip_predictor=True).last_hidden_state
            found: np.ndarray = features.float().cpu().numpy()
            return found

        apart = float(np.abs(ours(ids[:BATCH]) - other(ids[:BATCH])).max())
        if not apart < ALIKE:
            raise OctjepaError(
                f"this transformers computes other features from the same weights: they differ by {apart:.2g}"
            )

        def all_by(features: Any) -> Work:
            def work() -> int:
                for start in range(0, len(ids), BATCH):
                    features(ids[start : start + BATCH])
                return len(ids)

            return work

        setup = {
            "size": recipe.model.size,
            "tokens": recipe.token_count,
            "batch": BATCH,
            "volumes": len(ids),
            "features_differ_by": apart,
            "device": str(runtime.device),
            "threads": torch.get_num_threads(),
        }
        yield Comparison(rate(all_by(ours)), rate(all_by(other)), setup)


def _videos(store: Store, names: Sequence[str], recipe: Recipe) -> Float[Tensor, "b d 1 h w"]:
    """The same centred view and z-score that ours takes."""
    shape, size = geometry.center_crop(recipe.preprocessing), recipe.preprocessing.image_size

    def view(volume: CanonicalVolume) -> np.ndarray:
        exposed = intensity.lookup_table(volume.tissue_mean, volume.tissue_std)
        return exposed[geometry.apply_transform(volume.pixels, shape, size)]

    return torch.from_numpy(np.stack([view(store.read(name)) for name in names])).unsqueeze(2)
