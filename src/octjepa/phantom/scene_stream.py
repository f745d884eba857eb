"""Scenes from worker processes: a stream that a training run reads without waiting.

In: seed, ranges and number of workers. Out: `SceneStream.take()` returns the scenes that are ready. Workers are forked
and write into anonymous shared memory, a few slots each, so nothing is pickled and nothing remains after a kill. Scene
number i is the same whatever worker draws it; the order in which scenes arrive depends on the machine.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from typing import Final

import numpy as np

from octjepa.errors import OctjepaError
from octjepa.keys import generator
from octjepa.phantom.random_scene import (
    AS_IS,
    COLUMN_MM,
    COLUMNS,
    MODERATE,
    ROW_MM,
    ROWS,
    STRONG,
    Scene,
    SceneRanges,
    draw_scene,
)

_SLOTS: Final = 4
# The training mix: phantoms as they are, moderately and strongly randomised, 1:2:3.
TRAINING_MIX: Final = (AS_IS, MODERATE, MODERATE, STRONG, STRONG, STRONG)


@dataclass(frozen=True, eq=False)
class _Slots:
    """Shared arrays of one worker, a row per slot."""

    power: np.ndarray
    classes: np.ndarray
    boundaries: np.ndarray
    numbers: np.ndarray  # optics level, slice pitch in mm


def training_scene(seed: int, index: int, slices: int) -> Scene:
    """Scene `index` of the training sequence; its ranges are drawn from `TRAINING_MIX`."""
    ranges: SceneRanges = TRAINING_MIX[int(generator("scene mix", seed, index).integers(len(TRAINING_MIX)))]
    return draw_scene(seed, index, ranges, slices)


class SceneStream:
    """Worker processes that draw training scenes. Use it as a context manager; fork it before starting threads."""

    def __init__(self, seed: int, workers: int, slices: int = 6, start: int = 0) -> None:
        if workers < 1:
            raise OctjepaError(f"{workers} workers: expected at least one process that draws phantoms")
        context = multiprocessing.get_context("fork")
        self._slices = slices
        self._slots = [_shared_slots(slices) for _ in range(workers)]
        self._free = [context.Semaphore(_SLOTS) for _ in range(workers)]
        self._ready = [context.Semaphore(0) for _ in range(workers)]
        self._next = [0] * workers
        self._turn = 0
        self._workers: list[BaseProcess] = []
        for k in range(workers):
            arguments = (seed, range(start + k, 2**40, workers), slices, self._slots[k], self._free[k], self._ready[k])
            process = context.Process(target=_draw_scenes, args=(*arguments, os.getpid()), daemon=True)
            process.start()
            self._workers.append(process)

    def take(self, limit: int = 64) -> list[Scene]:
        """Up to `limit` scenes that are ready now. Raises OctjepaError when a worker has ended."""
        scenes: list[Scene] = []
        self._turn += 1
        for k in np.roll(np.arange(len(self._slots)), self._turn):  # no worker is served last for ever
            slots = self._slots[k]
            while len(scenes) < limit and self._ready[k].acquire(block=False):
                row = self._next[k] % _SLOTS
                self._next[k] += 1
                optics, pitch = slots.numbers[row]
                spacing = (float(pitch), ROW_MM, COLUMN_MM)
                arrays = (slots.power[row].copy(), slots.boundaries[row].copy(), slots.classes[row].copy())
                scenes.append(Scene(*arrays, spacing, int(optics)))
                self._free[k].release()
        if not scenes and not all(process.is_alive() for process in self._workers):
            codes = [process.exitcode for process in self._workers]
            raise OctjepaError(f"a process that draws phantoms has ended (exit codes {codes}); start the run again")
        return scenes

    def close(self) -> None:
        """Ends the workers."""
        for process in self._workers:
            process.terminate()
        for process in self._workers:
            process.join(timeout=5)

    def __enter__(self) -> SceneStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shared_slots(slices: int) -> _Slots:
    def shared(shape: tuple[int, ...], dtype: type) -> np.ndarray:
        count = int(np.prod(shape))
        memory = mmap.mmap(-1, count * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count).reshape(shape)

    return _Slots(
        power=shared((_SLOTS, slices, ROWS, COLUMNS), np.uint8),
        classes=shared((_SLOTS, slices, ROWS, COLUMNS), np.uint8),
        boundaries=shared((_SLOTS, slices, 8, COLUMNS), np.float32),
        numbers=shared((_SLOTS, 2), np.float64),
    )


def _draw_scenes(
    seed: int, indices: range, slices: int, slots: _Slots, free: Semaphore, ready: Semaphore, parent: int
) -> None:
    """The loop of a worker: fill free slots until the parent ends."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for count, index in enumerate(indices):
        scene = training_scene(seed, index, slices)
        while not free.acquire(timeout=1.0):
            if os.getppid() != parent:
                return
        if os.getppid() != parent:
            return
        row = count % _SLOTS
        slots.power[row], slots.classes[row], slots.boundaries[row] = scene.power, scene.classes, scene.boundaries_px
        slots.numbers[row] = scene.optics, scene.spacing_mm[0]
        ready.release()
