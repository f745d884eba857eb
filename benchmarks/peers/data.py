"""What is worked on: the recipe `tiny_cpu_vjepa`, and a few phantom eyes in a folder that is removed at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

from octjepa.config import load_recipe
from octjepa.distributed.precision import with_precision
from octjepa.distributed.runtime import Runtime
from octjepa.ingest import build_store
from octjepa.objectives.loss import token_grid_positions
from octjepa.phantom import write_cohort
from octjepa.recipe import Preprocessing, Recipe
from octjepa.store import Store
from octjepa.views.loader import Batch

RECIPE: tuple[str, ...] = ("tiny_cpu_vjepa",)  # its name, and keys that differ
WHOLE_GRID = ("tokens.select=all", "tokens.budget=null")  # every patch: others know nothing of tissue
PEOPLE = 12
SEED = 41


def bench_recipe(*more: str, name: str | None = None) -> Recipe:
    """`RECIPE`, or another `name` with its keys, and `more` of them, key=value each, in the precision that
    `octjepa pretrain` would choose here."""
    usual, *overrides = RECIPE
    recipe = load_recipe(name or usual, [*overrides, *more])
    return with_precision(recipe, Runtime(recipe.train.precision).precision)


@contextmanager
def phantom_files(people: int | None = None) -> Iterator[tuple[Path, Path]]:
    """(empty folder to work in, folder of a cohort beside it); two eyes a person, all of them for training."""
    with tempfile.TemporaryDirectory(prefix="octjepa-bench-") as name:
        work, cohort = Path(name, "work"), Path(name, "phantom")
        work.mkdir()
        write_cohort(cohort, people or PEOPLE, SEED, split_shares=(1.0, 0.0, 0.0))
        yield work, cohort


@contextmanager
def phantom_store(preprocessing: Preprocessing, people: int | None = None) -> Iterator[tuple[Path, Store]]:
    """(empty folder to work in, store of a cohort)."""
    with phantom_files(people) as (work, cohort):
        folder = work.with_name("store")
        build_store([cohort], folder, preprocessing)
        yield work, Store.open(folder)


def random_batch(recipe: Recipe, size: int | None = None) -> Batch:
    """Random numbers in the shapes of a batch of `size` volumes, by default the global batch."""
    count, tokens, (context, target) = size or recipe.train.global_batch, recipe.token_count, recipe.mask_counts
    p, q, r = recipe.tokens.patch_size
    seen, other = torch.randn(2, count, tokens, p * q * r)
    order = torch.stack([torch.randperm(tokens) for _ in range(count * recipe.masks.per_target)])
    index = torch.arange(tokens).expand(count, -1)
    positions = token_grid_positions(index, recipe.grid)
    hidden = order[:, context : context + target]
    names = tuple(map(str, range(count)))
    return Batch(seen, other, positions, index, torch.ones(count, tokens), order[:, :context], hidden, names)


@contextmanager
def one_thread() -> Iterator[None]:
    """Of torch, BLAS and OpenMP: the work of one core on both sides."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)
