"""The only file that knows devices and ranks: where to compute, in which precision, and how ranks communicate.

Processes are started by torchrun and find each other by its environment. Host numbers (flags, counts) travel over gloo
whatever the device, so that they never wait for a device; tensors travel by the device's own backend.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from octjepa.distributed import xla
from octjepa.distributed.precision import AUTO, choose_precision
from octjepa.errors import OctjepaError, UsageError
from octjepa.machine import cores, free_memory_bytes, process_memory_bytes

_log = logging.getLogger(__name__)
T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)  # a rank that sends nothing for so long is regarded as dead
HEARTBEAT_SECONDS = 60.0  # between two messages of a rank 0 that works while the others wait
_BUSY = "busy"  # the message of rank 0 while it works
_BUCKET_BYTES = 64 << 20  # gradients that are summed over the ranks at once
_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl"}


class RankZeroError(OctjepaError):
    """Rank 0 failed at something that it does for all ranks; the others end with its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(f"rank 0: {message}")
        self.exit_code = exit_code


class _Outcome(NamedTuple, Generic[T]):
    """The result of a function on rank 0, or the message and exit code of its error."""

    result: T | None
    failure: tuple[str, int] | None


def current_accelerator() -> torch.device | None:
    """The accelerator that torch uses; None without one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def best_device() -> torch.device:
    """The accelerator if there is one, else the processor."""
    return current_accelerator() or torch.device("cpu")


def every_device() -> list[torch.device]:
    """The CPU, and each accelerator that torch knows."""
    accelerator = current_accelerator()
    count = 0 if accelerator is None else torch.accelerator.device_count()
    return [torch.device("cpu"), *(torch.device(accelerator.type, n) for n in range(count) if accelerator is not None)]


def free_device_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on `device`; on a CPU that of the machine."""
    if device.type == "cpu":
        return free_memory_bytes()
    return int(torch.accelerator.get_memory_info(device)[0])


def check_compiler(device: torch.device) -> None:
    """Raises UsageError where `machine.compile` needs a compiler that is not installed, or is of no use."""
    if device.type == "xla":
        raise UsageError("machine.compile=true is unused on XLA, which compiles everything: set machine.compile=false")
    compiler = os.environ.get("CXX")
    names = [compiler] if compiler else ["g++", "clang++"]
    if device.type == "cpu" and not any(map(shutil.which, names)):
        raise UsageError(
            f"machine.compile=true needs a C++ compiler on a CPU, and {' and '.join(names)} are not to be found: "
            "install one (Debian: apt install g++), name it in CXX, or set machine.compile=false"
        )


def recompute(block: Callable[..., Tensor], x: Tensor, *arguments: object) -> Tensor:
    """`block(x, *arguments)` with activation checkpointing: the backward pass computes its activations again."""
    if x.device.type == "xla":
        return xla.checkpoint(block, x, *arguments)
    result: Tensor = checkpoint(block, x, *arguments, use_reentrant=False)
    return result


class Runtime:
    """This process's device, precision and rank; one process, unless a process group is up.

    `precision` is fp32 or bf16; `auto` is resolved for this process's device, and `precision_reason` says why.
    """

    def __init__(self, precision: str) -> None:
        accelerator = current_accelerator()
        self.device = xla.device() if xla.is_requested() else best_device()
        if accelerator is not None and dist.is_initialized():
            self.device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        self.precision, self.precision_reason = (
            choose_precision(AUTO, self.device) if precision == AUTO else (precision, "requested")
        )
        self.sharded = False  # whether FSDP2 shards the model over the ranks
        # torch.cuda has it, others may; it asks the driver, and never waits for the device
        self._utilisation = getattr(getattr(torch, self.device.type, None), "utilization", None)

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def autocast(self) -> AbstractContextManager[object]:
        """The context of forward passes: bf16 products over fp32 weights, or plain fp32."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """The sum over ranks of each of these host numbers, the same on every rank."""
        if self.world_size == 1:
            return [float(number) for number in numbers]
        total = torch.tensor(list(numbers), dtype=torch.float64)
        _communicate(lambda: dist.all_reduce(total))
        return total.tolist()

    def all_gather(self, texts: Iterable[str]) -> list[str]:
        """The texts of all ranks, by rank; the same on every rank."""
        own_texts = list(texts)
        if self.world_size == 1:
            return own_texts
        gathered: list[Any] = [None] * self.world_size
        _communicate(lambda: dist.all_gather_object(gathered, own_texts))
        return [text for texts_of_rank in gathered for text in texts_of_rank]

    def run_on_rank_zero(self, function: Callable[[], T]) -> T:
        """Calls `function` on rank 0 while the others wait, and returns its result on every rank.

        If it raises an OctjepaError, every rank raises one. The result has to be picklable. It may take any time (a
        large checkpoint on its way to a bucket): a heartbeat tells the others that rank 0 still works.
        """
        if self.world_size == 1:
            return function()
        outcome: _Outcome[T] | str = _BUSY
        error: OctjepaError | None = None
        if self.rank == 0:
            with _heartbeat():
                try:
                    outcome = _Outcome(function(), None)
                except OctjepaError as raised:
                    error, outcome = raised, _Outcome(None, (str(raised), raised.exit_code))
        sent = outcome
        while not isinstance(outcome := self.broadcast_object(sent), _Outcome):
            pass  # rank 0 still works
        if error is not None:
            raise error
        if outcome.failure is not None:
            raise RankZeroError(*outcome.failure)
        return cast(T, outcome.result)

    def broadcast_object(self, value: Any) -> Any:
        """Returns rank 0's `value` on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        _communicate(lambda: dist.broadcast_object_list(values))
        return values[0]

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Replaces the values of `tensor`, in place, by those of rank 0."""
        if self.world_size == 1:
            return
        host = tensor.cpu() if tensor.device.type == "xla" else tensor
        _communicate(lambda: dist.broadcast(host, 0))
        if host is not tensor:
            tensor.copy_(host)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Replaces `tensor`, in place, by its sum over the ranks, and returns it."""
        if tensor.device.type == "xla":
            xla.sum_over_ranks([tensor])
        elif dist.is_initialized():
            _communicate(lambda: dist.all_reduce(tensor))
        return tensor

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replaces every gradient by its sum over the ranks, several at once.

        It is called when all ranks agreed that each has its gradients, so that no rank waits for one that ran out of
        memory (docs/decisions/0004). For two ranks the sum is to the bit what one process adds; for more its order is
        the backend's.
        """
        if self.sharded or (self.world_size == 1 and not dist.is_initialized()):  # FSDP2 has summed them
            return
        if self.device.type == "xla":
            xla.sum_over_ranks([p.grad for p in parameters if p.grad is not None])
            return
        bucket: list[Tensor] = []
        size = 0
        for gradient in [p.grad for p in parameters if p.grad is not None]:
            bucket.append(gradient)
            size += gradient.numel() * gradient.element_size()
            if size >= _BUCKET_BYTES:
                self._sum_bucket(bucket)
                bucket, size = [], 0
        if bucket:
            self._sum_bucket(bucket)

    def _sum_bucket(self, gradients: list[Tensor]) -> None:
        flat = self.sum_over_ranks(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def mean_over_ranks(self, total: Tensor, count: Tensor) -> Tensor:
        """The mean of a sum over every rank's items, not the mean of the ranks' means."""
        pair = torch.stack([total.double(), count.double()])
        if dist.is_initialized():
            _communicate(lambda: dist.all_reduce(pair))
        return pair[0] / pair[1]

    def memory(self) -> dict[str, int]:
        """Bytes of this process now, and the most that its tensors took on the accelerator; never waits."""
        memory = {"memory/process_bytes": process_memory_bytes()}
        if self.device.type == "xla":
            memory |= xla.memory()
        if torch.accelerator.is_available():
            with suppress(RuntimeError):  # not every accelerator's allocator counts
                memory["memory/device_bytes"] = torch.accelerator.max_memory_allocated()
        return memory

    def utilisation(self) -> dict[str, float]:
        """The share of the last moments, 0 to 1, in which the device computed; empty where the driver does not say."""
        if self._utilisation is None:
            return {}
        try:
            return {"device_utilisation": self._utilisation(self.device) / 100}
        except (ImportError, RuntimeError, OSError) as error:
            self._utilisation = None
            _log.info("no device utilisation in the journal: %s", str(error).splitlines()[0])
            return {}

    def start_copy(self, tensor: Tensor) -> tuple[Tensor, torch.Event | None]:
        """A copy on its way to the host, and the event after which it is there. On XLA the update's graph ends here."""
        if self.device.type == "xla":
            xla.sync()
        if self.device.type in ("xla", "cpu"):
            return tensor, None
        host, event = tensor.to("cpu", non_blocking=True), torch.Event(self.device, blocking=True)  # who waits sleeps
        event.record()
        return host, event

    def describe(self) -> dict[str, str | int]:
        """Device, precision, processes, threads, torch and cores, for run.json."""
        return {
            "device": str(self.device),
            "precision": self.precision,
            "precision_reason": self.precision_reason,
            "processes": self.world_size,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "cores": cores(),
        }


@contextmanager
def distributed_context() -> Iterator[Runtime]:
    """Joins the processes that a launcher started, if any, and leaves them at the end.

    The runtime computes in fp32 until `agree_on_precision`.
    Raises UsageError: the launcher's environment is incomplete, or the other processes do not come.
    """
    processes = _launched_processes()
    joins = processes > 1 and not dist.is_initialized()
    if joins:
        _join(processes)
    try:
        yield Runtime("fp32")
    finally:
        if joins:
            dist.destroy_process_group()


def _launched_processes() -> int:
    """The number of processes that the launcher started. Raises UsageError: WORLD_SIZE is not a number."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise UsageError(
            f"WORLD_SIZE is {text!r}, expected the number of processes: start them with torchrun, which sets it, or "
            "unset WORLD_SIZE"
        )
    return int(text)


def _join(processes: int) -> None:
    missing = [n for n in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {processes}, but {', '.join(missing)} is not set: start the processes with torchrun, which "
            "sets all of them, or unset WORLD_SIZE"
        )
    backend = "gloo"
    if xla.is_requested():
        xla.initialize(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        if xla.world_size() != processes:
            raise UsageError(
                f"the launcher started {processes} processes, but torch_xla sees {xla.world_size()} replicas: start "
                "one process for every chip of the slice"
            )
    if torch.accelerator.is_available():
        device, local = torch.accelerator.current_accelerator(), int(os.environ["LOCAL_RANK"])
        assert device is not None
        count = torch.accelerator.device_count()
        if local >= count:
            raise UsageError(
                f"process {local} of this machine has no device, because there are only {count}. Start torchrun with "
                f"--nproc-per-node {count}"
            )
        torch.accelerator.set_device_index(local)
        backend = f"cpu:gloo,{device.type}:{_BACKENDS.get(device.type, 'gloo')}"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"rank {os.environ['RANK']} of {processes} could not reach the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']}: {error}"
        ) from None


@contextmanager
def _heartbeat() -> Iterator[None]:
    """While this is open, tells the ranks that wait for this one that it still works."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            try:
                dist.broadcast_object_list([_BUSY])
            except RuntimeError:  # a rank is gone: this one meets that when it has finished, and says so
                return

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _communicate(exchange: Callable[[], object]) -> None:
    """Calls a collective. Raises OctjepaError where a rank is gone: the run ends, to resume from its checkpoint."""
    try:
        exchange()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise OctjepaError(
            f"rank {dist.get_rank()} lost the others ({reason}). One of them ended or hangs: see its log. Start the "
            "processes again with --resume; the run continues from its last checkpoint."
        ) from None


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor that FSDP2 distributes over the ranks; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that FSDP2 distributes, gathered by all ranks together; any other tensor unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
