"""The default recipe's masked autoencoder against VideoMAE of Hugging Face's transformers, trained a step.

Both encode visible patches alone, at the same width and depth, with the same share of them, and decode at the same
width and depth. Theirs knows whole videos, predicts every hidden patch and normalises each (Tong et al. 2022); ours
predicts a quarter of the hidden ones. It has no target network, ours takes the EMA along that a recipe may export.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from benchmarks.peers.alternating_runs import Comparison
from benchmarks.peers.data import WHOLE_GRID, bench_recipe
from benchmarks.peers.step import UPDATES, Work, clip_and_step, comparison, plain_adamw, update_of
from benchmarks.peers.transformers_vjepa2 import import_transformers
from jaxtyping import Bool
from torch import Tensor

from octjepa.distributed.precision import wait_for
from octjepa.distributed.runtime import Runtime
from octjepa.recipe import Recipe

RECIPE = "tiny_cpu"
ALIKE = (*WHOLE_GRID, "masks.target_share=1.0")  # every patch of the grid, every hidden one predicted


def videomae_model(recipe: Recipe) -> Any:
    """`VideoMAEForPreTraining` of the recipe's size, with random weights.

    Raises UsageError where transformers is not installed.
    """
    transformers = import_transformers()
    (frames, rows, columns), (tubelet, patch, _) = recipe.preprocessing.image_size, recipe.tokens.patch_size
    size = recipe.model.encoder_size
    width = recipe.model.predictor_width or size.predictor_width
    depth = recipe.model.predictor_depth or size.predictor_depth
    config = transformers.VideoMAEConfig(
        image_size=(rows, columns),
        patch_size=patch,
        num_channels=1,
        num_frames=frames,
        tubelet_size=tubelet,
        hidden_size=size.width,
        num_hidden_layers=size.depth,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        decoder_hidden_size=width,
        decoder_num_hidden_layers=depth,
        decoder_num_attention_heads=size.predictor_heads,
        decoder_intermediate_size=4 * width,
    )
    return transformers.VideoMAEForPreTraining(config)


def hidden_patches(recipe: Recipe) -> Bool[Tensor, "b tokens"]:
    """All but as many random patches of each video as the recipe's context has."""
    count, visible = recipe.train.global_batch, recipe.mask_counts[0]
    hidden = torch.ones(count, recipe.token_count, dtype=torch.bool)
    order = torch.rand(count, recipe.token_count).argsort(dim=1)
    return hidden.scatter(1, order[:, :visible], value=False)


def step_by_videomae(recipe: Recipe) -> Work:
    """Updates of theirs in a plain loop, `recipe` having every patch of the grid."""
    runtime = Runtime(recipe.train.precision)
    model = videomae_model(recipe).to(runtime.device).train()
    optimizer = plain_adamw(model, recipe.train)
    d, h, w = recipe.preprocessing.image_size
    videos, hidden = torch.randn(recipe.train.global_batch, d, 1, h, w), hidden_patches(recipe)

    def work() -> int:
        for _ in range(UPDATES):
            with runtime.autocast():
                seen = videos.to(runtime.device, non_blocking=True)
                loss = model(seen, bool_masked_pos=hidden.to(runtime.device)).loss
            loss.backward()
            clip_and_step(model, optimizer, recipe.train)
        wait_for(runtime.device)
        return UPDATES * recipe.train.global_batch

    return work


@contextmanager
def step_against_videomae(*changes: str) -> Iterator[Comparison]:
    """Ours as the recipe has it but for `changes`, theirs with every patch."""
    recipe = bench_recipe(*changes, name=RECIPE)
    yield comparison(update_of(recipe), step_by_videomae(bench_recipe(*ALIKE, name=RECIPE)), recipe)
