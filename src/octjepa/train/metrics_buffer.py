"""What came of each update: figures from the device to the journal, to the guard and to the health watch.

They are read one update late, when the device has long been given the next: following a run never makes it wait. Where
the run must know, before a checkpoint or a look at the model, `settle` reads what is on its way at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from octjepa.distributed.runtime import Runtime
from octjepa.progress import Bar
from octjepa.train.health import Health
from octjepa.train.spike_guard import Guard
from octjepa.train.step import Figures
from octjepa.train.tracking import Record


class Trail:
    """`skipped` counts unfit updates, `lost` says that too many came in a row; `names(update)` are its volumes."""

    def __init__(
        self,
        journal: Record,
        guard: Guard,
        health: Health,
        progress: Bar,
        names: Callable[[int], list[str]],
        skipped: int,
        runtime: Runtime,
    ) -> None:
        self._runtime = runtime
        self._journal, self._guard, self._health, self._bar, self._names = journal, guard, health, progress, names
        self.skipped, self.lost = skipped, False
        self._sent: tuple[int, list[str], torch.Tensor, torch.Event | None, Mapping[str, Any]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.settle()  # whatever ended the run, the line of its last whole update is kept

    def push(self, update: int, figures: Figures, line: Mapping[str, Any]) -> None:
        """Starts the figures of `update` (from 0) on their way, and settles the update before."""
        packed = torch.stack([value.float() for value in figures.values()])
        host, event = self._runtime.start_copy(packed)
        before, self._sent = self._sent, (update, list(figures), host, event, line)
        self._settle(before)

    def settle(self) -> None:
        """Nothing is on its way afterwards."""
        before, self._sent = self._sent, None
        self._settle(before)

    def unfit(self) -> dict[int, list[str]]:
        """The unfit updates in a row, from 0, and their volumes."""
        return {update: self._names(update) for update in self._guard.row}

    def return_to(self, skipped: int) -> None:
        """The run went back: what is on its way belongs to updates that are taken back."""
        self._sent, self.lost, self.skipped = None, False, skipped

    def _settle(self, sent: tuple[int, list[str], torch.Tensor, torch.Event | None, Mapping[str, Any]] | None) -> None:
        if sent is None or self.lost:  # what came after the row will be taken back
            return
        update, names, host, event, line = sent
        if event is not None:
            event.synchronize()
        told = dict(zip(names, host.tolist(), strict=True))
        healthy = bool(told.pop("healthy"))
        self.lost = self._guard.follow(update, healthy, told["train/grad_norm"]) or self.lost
        self.skipped += not healthy
        self._health.follow(told.get("train/loss_hidden", told["train/loss"]))
        self._journal.write(
            update + 1, {**told, **line} if healthy else {**told, **line, "skipped": self._names(update)}
        )
        self._bar.advance()
        self._bar.say(f"loss {told['train/loss']:.3f} cosine {told['train/cosine']:.3f}")
