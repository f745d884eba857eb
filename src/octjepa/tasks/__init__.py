"""Supervised tasks: fine-tuning (`finetune`), segmentation of layers and lesions, and the truth of phantoms (`truth`).

`segment` trains heads on an encoder, `segmenter` is the packaged network of `octjepa segment SCAN`. Both use `labels`
(files of labels and segmentations) and `thickness` (ETDRS sectors). `distil` teaches an encoder the tokens of another.

In: a task recipe, a checkpoint, a store and labels. Out: a folder with the tuned network or head and its test metrics
next to baselines. Fails with RecipeError on a recipe, UsageError on labels, ContractError on other weights. Packages
add a task by an entry point of the group `octjepa.tasks`; `octjepa inspect` then describes its folders as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from octjepa.registry import Registry


@runtime_checkable
class Task(Protocol):
    """The description of a task for code outside its package."""

    def holds(self, folder: Path) -> bool:
        """Whether `folder` is one that this task wrote."""

    def describe(self, folder: Path) -> dict[str, object]:
        """The output of `octjepa inspect` for such a folder. Raises OctjepaError: a damaged file."""


TASKS: Registry[Task] = Registry(
    "task",
    "octjepa.tasks",
    {"finetune": "octjepa.tasks.finetune.folder", "segment": "octjepa.tasks.segment.folder"},
)


def find_task(folder: Path) -> Task | None:
    """The task that wrote `folder`; None if none did."""
    return next((task for name in TASKS.names() if (task := TASKS.get(name)).holds(folder)), None)
