"""Gradients are summed over the ranks while the backward pass computes the others, as DistributedDataParallel does.

Unlike there, a rank that runs out of memory anywhere in its micro-batches leaves nobody waiting: it sends zeros for
what is missing, and the ranks agree afterwards that the sums are not used (`octjepa.train.step.MicroBatcher`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

_EIGHTH = 8  # a bucket holds at least this part of the gradients, so there are eight at most ...
# ... but for the bounds of its size; the upper is DistributedDataParallel's
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 25 << 20


def split_into_buckets(parameters: Iterable[Parameter], bucket_bytes: int | None = None) -> list[list[Parameter]]:
    """The trained ones of `parameters` in reversed order, a bucket ended by the parameter that fills `bucket_bytes`.

    By default an eighth of all, between 1 and 25 MiB: large parameters make it fewer than eight buckets (seven for
    tiny_cpu), large models more. Nothing hides the sum of the last one, so it should be small.
    """
    trained = [p for p in parameters if p.requires_grad]
    total = sum(p.numel() * p.element_size() for p in trained)
    limit = bucket_bytes or min(max(total // _EIGHTH, _LEAST_BYTES), _MOST_BYTES)
    buckets: list[list[Parameter]] = []
    size = limit
    for parameter in reversed(trained):
        if size >= limit:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets


class GradientBuckets:
    """The gradients of `parameters` in buckets, each summed over the ranks as soon as it is whole.

    Buckets follow the reversed order of the parameters, which is about the order of the backward pass, and every rank
    starts them in this order, whatever the order in which its gradients come. `communicate` calls a collective and
    translates its errors. A bucket is a copy of its gradients until `finish`: at most the size of the trained weights.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        communicate: Callable[[Callable[[], object]], None],
        bucket_bytes: int | None = None,
    ) -> None:
        self._communicate = communicate
        self._buckets = split_into_buckets(parameters, bucket_bytes)
        self._bucket_of = {p: number for number, bucket in enumerate(self._buckets) for p in bucket}
        self._missing: list[int] = []  # gradients that each bucket waits for
        self._sums: list[tuple[Tensor, dist.Work]] = []  # of the buckets that were started
        self._earlier: Sequence[Mapping[Parameter, Tensor]] = ()  # sums of the micro-batches before the last
        self.is_open = False  # whether a backward pass is being summed
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._add)

    def open(self, earlier: Sequence[Mapping[Parameter, Tensor]] = ()) -> None:
        """The next backward pass gives the last gradients of the update.

        To each of them the sums of micro-batches in `earlier` are added, the last sum first, before it is sent.
        """
        self._earlier = earlier
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sums = []
        self.is_open = True

    def finish(self) -> None:
        """Replaces every gradient by its sum over the ranks. A parameter without a gradient keeps none."""
        self._start_all(as_zeros=False)
        for bucket, (flat, work) in zip(self._buckets, self._sums, strict=True):
            self._communicate(work.wait)
            parts = flat.split([parameter.numel() for parameter in bucket])
            pairs = [(p.grad, part.view_as(p)) for p, part in zip(bucket, parts, strict=True) if p.grad is not None]
            if pairs:
                torch._foreach_copy_([gradient for gradient, _ in pairs], [part for _, part in pairs])
        self._close()

    def send_zeros(self) -> None:
        """Takes part in the sums of this update, which the other ranks wait for or will: with zeros from here on."""
        if not self.is_open:  # memory ran out before the last backward pass began
            self.open()
        self.discard()

    def discard(self) -> None:
        """Ends the sums of a pass that was opened, with zeros for what is missing; the gradients stay as they are."""
        if self.is_open:
            self._start_all(as_zeros=True)
            for _, work in self._sums:
                self._communicate(work.wait)
            self._close()

    def _close(self) -> None:
        self._sums, self._earlier = [], ()
        self.is_open = False

    def _add(self, parameter: Tensor) -> None:
        """Called by autograd when the gradient of `parameter` is there."""
        if self.is_open:
            self._missing[self._bucket_of[parameter]] -= 1  # type: ignore[index] # a Parameter, by its hook
            while len(self._sums) < len(self._buckets) and not self._missing[len(self._sums)]:
                self._start(as_zeros=False)

    def _start_all(self, as_zeros: bool) -> None:
        while len(self._sums) < len(self._buckets):
            self._start(as_zeros)

    def _start(self, as_zeros: bool) -> None:
        """Starts the sum of the next bucket."""
        bucket = self._buckets[len(self._sums)]
        if not as_zeros:
            self._add_earlier(bucket)
        flat = torch.cat(
            [
                p.new_zeros(p.numel()) if as_zeros or p.grad is None else p.grad.flatten()
                for p in bucket
            ]
        )  # fmt: skip
        works: list[dist.Work] = []
        self._communicate(lambda: works.append(dist.all_reduce(flat, async_op=True)))
        self._sums.append((flat, works[0]))

    def _add_earlier(self, bucket: Sequence[Parameter]) -> None:
        """Adds the sums of earlier micro-batches to the gradients of a bucket, in place of the sums."""
        for sums in reversed(self._earlier):
            for parameter in bucket:
                if (before := sums.get(parameter)) is not None:
                    parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
