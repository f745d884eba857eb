"""A loader process that dies ends the run with its cause, wherever the run was just then; an error keeps its trace."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

from octjepa.errors import OctjepaError
from octjepa.train import loop
from octjepa.train.loop import pretrain
from octjepa.views.workers import translate_transfer_errors, translate_worker_errors
from synthetic import MemoryStore, small_recipe


def die_of_a_segmentation_fault() -> None:
    """Kills this process. pytest's fault handler, which a forked process inherits, would print a page of stack."""
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


RESUME = "continue with --resume"
DEATHS: dict[str, tuple[Callable[[], Any], str]] = {
    "killed": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        f"a loader process was killed (SIGKILL), most often by the system because memory is full.*{RESUME}",
    ),
    "crashed": (
        lambda: die_of_a_segmentation_fault(),
        f"a loader process died of a signal (Segmentation fault).*loader_workers=0 shows.*{RESUME}",
    ),
    "ended": (lambda: os._exit(3), "a loader process ended unexpectedly with exit code 3"),
    "files": (  # multiprocessing drops a batch that it cannot hand over, and the run would wait for ever
        lambda: use_up_files(),
        "a loader process (could not send a batch: Too many open files. Raise the limit|broke off)",
    ),
    "memory": (lambda: fill_up(), f"a loader process ran out of memory: lower machine.loader_workers.*{RESUME}"),
}


def fill_up() -> None:
    """As much as the system gives; here that is soon the limit of a terabyte of addresses."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, resource.getrlimit(resource.RLIMIT_AS)[1]))
    np.empty(1 << 41, np.uint8)


def use_up_files() -> None:
    """From here on this process can open but three files more."""
    with Path(os.devnull).open() as last:
        free = last.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def refuse(error: Exception) -> None:
    raise error


def run_with(do: Callable[[], Any], out: Path) -> None:
    """A run whose loader process does `do` at its 14th volume, in the fourth update."""
    recipe = small_recipe(
        train={"max_updates": 8, "global_batch": 4, "base_lr": 1e-3, "precision": "fp32"},
        machine={"loader_workers": 1},
        monitor={"every_updates": None},
    )
    store = MemoryStore(recipe.preprocessing)
    honest, main, read = store.volumes, os.getpid(), []

    class Doomed(dict[str, Any]):
        def __getitem__(self, volume_id: str) -> Any:
            read.append(volume_id)
            if os.getpid() != main and len(read) == 14:
                do()
            return honest[volume_id]

    store.volumes = Doomed(honest)
    pretrain(recipe, store, out)


@pytest.fixture
def only_code_of_the_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch raises the news of a death wherever Python is: also in what only tests have, which would distort it.

    In a check of shapes it would read as a wrong shape; in a plugin's meter of garbage collections it would be lost.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    meters = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = meters


@pytest.mark.usefixtures("only_code_of_the_run")
@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.slow
def test_the_cause_is_reported(death: str, tmp_path: Path) -> None:
    do, message = DEATHS[death]
    escaped = message if death == "files" else message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(OctjepaError, match=escaped):
        run_with(do, tmp_path / "run")


@pytest.mark.slow
def test_a_death_in_the_midst_of_the_arithmetic_is_reported_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises it wherever the main process is when the news arrives; here that is inside an update."""

    def interrupted(*_: Any) -> Any:
        raise RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. ")

    monkeypatch.setattr(loop, "accumulate", interrupted)
    with pytest.raises(OctjepaError, match="a loader process was killed") as outputs:
        run_with(lambda: None, tmp_path / "run")
    assert outputs.value.exit_code == 1


def test_of_two_errors_the_one_that_knows_the_signal_is_reported() -> None:
    """torch's iterator says "ended" where its signal handler said of what, a moment before."""

    def next_batch() -> None:
        try:
            raise RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. ")
        except RuntimeError as first:
            raise RuntimeError("DataLoader worker (pid(s) 77, 78) exited unexpectedly") from first

    with pytest.raises(OctjepaError, match="was killed"), translate_worker_errors():
        next_batch()


def test_a_death_whose_cause_torch_lost_is_read_from_the_process() -> None:
    child = multiprocessing.get_context("fork").Process(target=die_of_a_segmentation_fault)
    child.start()
    message = r"died of a signal \(Segmentation fault\)"
    with pytest.raises(OctjepaError, match=message), translate_worker_errors(), translate_transfer_errors([child]):
        raise RuntimeError("DataLoader worker (pid(s) 77) exited unexpectedly")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR2])
def test_a_death_while_a_batch_is_handed_over_is_reported_alike(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch comes by a connection to the process that made it."""

    def broken(taking: Any, *_: Any) -> Any:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the connection breaks before torch hears of the death
        os.kill(taking._workers[0].pid, number)
        raise ConnectionResetError(104, "Connection reset by peer")

    honest = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(torch.utils.data.dataloader._MultiProcessingDataLoaderIter, "_try_get_data", broken)
    with pytest.raises(OctjepaError, match=r"was killed \(SIGKILL\)|died of a signal \(User defined signal 2\)"):
        run_with(lambda: None, tmp_path / "run")
    signal.signal(signal.SIGCHLD, honest)


def test_an_error_in_a_loader_process_keeps_its_position(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=re.compile(r"a bug in a view.*", re.DOTALL)) as found:
        run_with(lambda: refuse(RuntimeError("a bug in a view")), tmp_path / "run")
    assert not isinstance(found.value, OctjepaError)
    assert "in refuse" in str(found.value), "the traceback of the loader process"


@pytest.mark.slow
def test_what_a_loader_process_refuses_is_reported_as_it_was_there(tmp_path: Path) -> None:
    """Every volume lost: the message of the loader process, without its traceback."""
    recipe = small_recipe(machine={"loader_workers": 1}, monitor={"every_updates": None})
    store = MemoryStore(recipe.preprocessing)
    store.volumes = {}
    store.read = lambda volume_id, halves=False: refuse(OctjepaError("its disk is gone"))  # type: ignore[method-assign]
    with pytest.raises(
        OctjepaError, match=r"^12 training volumes in a row cannot be read; the last: its disk is gone$"
    ):
        pretrain(recipe, store, tmp_path / "run")
