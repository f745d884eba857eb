"""The training engine: the parts of an update that all training loops of octjepa share.

`accumulate_gradients` takes the losses of micro-batches and leaves their gradient in the network. `MicroBatcher` runs
it with a micro-batch that fits into the memory of every rank. `take_step` sums over the ranks, clips, and takes the
optimizer step unless an update is unhealthy. `LateMetrics` reads the metrics of an update while the next one runs. The
state that a training resumes from is written and read by `octjepa.checkpoint.state`.

Each loop stays visible: `octjepa.train.loop` (pretraining) and `octjepa.train.supervised` (fine-tuning, segmentation,
probes) read a batch, call the engine, log and save. The engine works with any `nn.Module`; a task gives it a function
that yields the loss of each micro-batch.

Nothing in `take_step` waits for an accelerator: a fused optimizer decides on the device whether the step is taken
(`found_inf`, made for loss scaling). So the host prepares the next update while the device computes.
"""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from octjepa.distributed.adamw import skips_on_device
from octjepa.distributed.runtime import Runtime, full_tensor
from octjepa.distributed.signals import StepFlags
from octjepa.errors import OctjepaError, is_out_of_memory

_log = logging.getLogger(__name__)
T = TypeVar("T")


class MicroLoss(NamedTuple):
    """A micro-batch's share of the mean loss of the global batch, and scalars to be summed in the same way."""

    loss: Float[Tensor, ""]
    metrics: Mapping[str, Float[Tensor, ""]]


def accumulate_gradients(network: nn.Module, losses: Iterable[MicroLoss]) -> dict[str, Float[Tensor, ""]]:
    """Takes the gradient of each loss in turn, and returns the sums of their metrics.

    The gradient of the whole batch is left in `network`. Gradients of micro-batches are added in pairs of equal size,
    as two ranks add theirs, so the micro-batch does not change the update: 1x32, 2x16 and 4x8 give the same weights.
    """
    metrics: dict[str, Tensor] = {}
    sums: list[tuple[int, list[Tensor | None]]] = []  # (number of micro-batches, sum of their gradients)
    for loss, values in losses:
        loss.backward()
        for name, value in values.items():
            metrics[name] = value if name not in metrics else metrics[name] + value
        # after the pass, in which FSDP2 replaces its shards by whole tensors
        sums.append((1, [parameter.grad for parameter in network.parameters()]))
        network.zero_grad(set_to_none=True)
        while len(sums) > 1 and sums[-1][0] == sums[-2][0]:
            _add_last_two(sums)
    while len(sums) > 1:
        _add_last_two(sums)
    for _, gradients in sums:
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.grad = gradient
    return metrics


def _add_last_two(sums: list[tuple[int, list[Tensor | None]]]) -> None:
    """Replaces the last two sums of gradients by their sum, in place."""
    count, gradients = sums.pop()
    count_before, before = sums.pop()
    added = [a if b is None else b if a is None else a.add_(b) for a, b in zip(before, gradients, strict=True)]
    sums.append((count + count_before, added))


def take_step(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    metrics: Mapping[str, Float[Tensor, ""]],
    runtime: Runtime,
    clip_norm: float | None,
    norm_limit: float,
) -> dict[str, Tensor]:
    """Sums gradients and metrics over the ranks, clips, steps; returns the sums, `grad_norm` and `healthy`.

    `grad_norm` is the norm before clipping; `clip_norm` None: gradients are not clipped. A metric or a norm that is not
    finite, or a norm above `norm_limit`, leaves weights and moments unchanged. `healthy` is then false, and nothing
    that follows the weights may move either. Every rank decides from the same sums, so all decide alike.
    """
    names = list(metrics)
    summed = runtime.sum_over_ranks(torch.stack([metrics[name] for name in names]))
    runtime.sum_gradients(network.parameters())
    norm = full_tensor(torch.nn.utils.clip_grad_norm_(network.parameters(), clip_norm or float("inf")))
    limit = min(norm_limit, torch.finfo(norm.dtype).max)  # XLA compiles infinity in, but takes a number as an input
    healthy = torch.isfinite(norm) & torch.isfinite(summed).all() & (norm <= limit)
    if skips_on_device(optimizer):
        optimizer.found_inf = (~healthy).float()  # type: ignore[attr-defined] # read by step()
        optimizer.step()
    elif bool(healthy):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {**dict(zip(names, summed, strict=True)), "grad_norm": norm.detach(), "healthy": healthy}


class MemoryAdvice(Protocol):
    """The messages of a training whose memory runs out; each training knows what its user can change."""

    def out_of_memory(self, micro_batch: int) -> str | None:
        """Why `micro_batch` samples do not fit and cannot be divided; None where half of them may be tried."""

    def halved(self, micro_batch: int) -> str:
        """The changes for the user, after every rank went down to `micro_batch` samples at once."""


class MicroBatcher:
    """Computes gradients in micro-batches of `micro_batch` samples; all ranks halve it when one runs out of memory.

    The batch of an update stays as it is, so the weights are the same except for rounding.
    """

    def __init__(self, runtime: Runtime, micro_batch: int, advice: MemoryAdvice) -> None:
        self._runtime, self.micro_batch, self._advice = runtime, micro_batch, advice

    def run(
        self,
        networks: Sequence[nn.Module],
        gradients: Callable[[int], T],
        agree: Callable[[bool], StepFlags],
        update: int,
    ) -> tuple[T | None, StepFlags]:
        """(what `gradients(micro_batch)` returned, the flags of all ranks), once no rank ran out of memory.

        networks: those that `gradients` leaves gradients in. agree: exchanges the flags of all ranks; its argument says
        whether this rank ran out of memory. The result is None only where some rank has no batch: then nothing is tried
        again. Raises OctjepaError on every rank: no smaller micro-batch is possible, or the model is sharded.
        """
        while True:
            result = self._try(networks, gradients, update)
            flags = agree(result is None)
            if flags.without_batch or not flags.out_of_memory:
                return result, flags
            _free_gradients(networks)
            if (message := self._advice.out_of_memory(self.micro_batch)) is not None:
                raise OctjepaError(f"update {update + 1}: {message}")
            self.micro_batch //= 2
            _log.warning("out of memory at update %d: %s", update + 1, self._advice.halved(self.micro_batch))

    def _try(self, networks: Sequence[nn.Module], gradients: Callable[[int], T], update: int) -> T | None:
        """The result of `gradients`; None, and no gradients, if this rank ran out of memory."""
        try:
            return gradients(self.micro_batch)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self._runtime.sharded:  # the other ranks already wait for this one inside their backward pass
                raise OctjepaError(
                    f"rank {self._runtime.rank} ran out of memory at update {update + 1}: lower machine.micro_batch "
                    f"(now {self.micro_batch}) and continue with --resume"
                ) from None
        _free_gradients(networks)  # after the except clause, whose exception holds the tensors of its frames
        return None


def _free_gradients(networks: Sequence[nn.Module]) -> None:
    for network in networks:
        network.zero_grad(set_to_none=True)
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


@dataclass(frozen=True)
class _Sent:
    """Metrics of an update on their way to the host: `values` are valid after `copied`."""

    update: int
    names: list[list[str]]
    values: Tensor | None
    copied: torch.Event | None
    about: Any


class LateMetrics(ABC):
    """Metrics of each update, read one update late: the device then already has the next one, and never waits.

    A context manager that writes the last whole update, whatever ends the training. Where a loop needs the metrics at
    once, before a checkpoint or a validation, it calls `flush`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sent: _Sent | None = None

    @abstractmethod
    def write(self, update: int, steps: list[dict[str, float]], about: Any) -> None:
        """Records the metrics of `update` (from 0), one dictionary for each network; `about` as given to `push`."""

    def push(self, update: int, steps: Sequence[Mapping[str, Float[Tensor, ""]]], about: Any) -> None:
        """Starts copying the scalars of `update` (from 0) to the host, and writes the update before."""
        scalars = [value.float() for step in steps for value in step.values()]
        values, copied = self._runtime.start_copy(torch.stack(scalars)) if scalars else (None, None)
        before, self._sent = self._sent, _Sent(update, [list(step) for step in steps], values, copied, about)
        self._write(before)

    def flush(self) -> None:
        """Writes the update that is on its way. Raises what `write` raises."""
        before, self._sent = self._sent, None
        self._write(before)

    def discard(self) -> None:
        """Forgets the update that is on its way."""
        self._sent = None

    def _write(self, sent: _Sent | None) -> None:
        if sent is None:
            return
        if sent.copied is not None:
            sent.copied.synchronize()
        values = iter([] if sent.values is None else sent.values.tolist())
        self.write(sent.update, [{name: next(values) for name in names} for names in sent.names], sent.about)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OctjepaError) if error is not None else nullcontext():
            self.flush()
