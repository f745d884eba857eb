"""How large everything is: on a GPU, in the rehearsal on a CPU with 24 people, and in the test of the rehearsal."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from benchmarks.exam.settings import REAL_EYES, TUNED
from benchmarks.exam.settings import Settings as ExamSettings

_LARGE = (
    "pretrain_vjepa_multi_domain",
    "tokens.select=tissue",
    "tokens.budget=3168",
    "train.global_batch=64",
    "machine.micro_batch=8",
    "machine.devices=1",
)
_MAE = (
    "objective.name=mae",
    "masks.random=1",
    "masks.tubes=0",
    "masks.blocks=0",
    "masks.runs=0",
    "masks.target_share=0.25",
    "model.predictor_width=192",
    "model.predictor_depth=2",
)
_TINY = ("model.size=test", "model.width=24", "model.depth=1", "model.heads=2", "model.predictor_width=12")
_TINY += ("model.predictor_depth=1", "model.predictor_heads=2")


@dataclass(frozen=True)
class Settings:
    """Sizes of the campaign. A recipe is a name and overrides, as the command line takes them.

    people: of the small store of parts 1 and 2. updates: of the runs whose losses are compared. steps: name -> recipe
    of which updates are timed; peers: recipe of the comparison with other implementations. encoders: name -> overrides
    of the exam's recipe. `views` times each of `milestones` are the views after which an encoder is read. tests: what
    pytest runs on the device. read_processes: 0 reads the rows of the exam in this process. compiled: blocks are timed
    compiled, too. in_process: jobs that are waited for run in the campaign's process, which saves their starts.
    """

    name: str
    people: int
    updates: int
    small: tuple[str, ...]  # recipe of part 1, on the small store
    memory: dict[str, tuple[str, ...]]
    steps: dict[str, tuple[str, ...]]
    peers: tuple[str, ...]
    gemm_sides: tuple[int, ...]
    repeats: int
    turns: int  # updates in a timed turn
    loader_updates: int
    exam: ExamSettings
    encoders: dict[str, tuple[str, ...]]
    views: int
    milestones: tuple[int, ...]
    without: tuple[str, ...]  # tasks of the exam that are not read
    one_gpu: tuple[str, ...]
    one_gpu_people: int
    one_gpu_seconds: float
    tests: tuple[str, ...]
    read_processes: int
    compiled: bool = True
    in_process: bool = False
    workers: int = field(default_factory=lambda: max(1, (os.cpu_count() or 1) - 2))


# Batches are eight times the exam's, for speed, with twice its rate of 5e-4; decided before any run.
FULL = Settings(
    name="full",
    people=24,
    updates=50,
    small=("tiny_cpu_vjepa", "monitor.every_updates=25"),
    memory={"one_gpu": ("one_gpu",), "small": (*_LARGE, "model.size=small"), "base": (*_LARGE, "model.size=base")},
    steps={"small": (*_LARGE, "model.size=small"), "base": (*_LARGE, "model.size=base")},
    peers=("one_gpu", "train.global_batch=32", "machine.micro_batch=null"),
    gemm_sides=(4096, 8192),
    repeats=5,
    turns=8,
    loader_updates=60,
    exam=ExamSettings(),
    encoders={
        "mae": (*_MAE, "train.global_batch=256", "train.base_lr=1e-3"),
        "vjepa": (
            "objective.name=vjepa",
            "masks.target_share=0.5",
            "masks.per_target=4",
            "train.global_batch=64",
            "train.base_lr=1e-3",
        ),
        "mae_coarse": (
            *_MAE,
            "train.global_batch=256",
            "train.base_lr=1e-3",
            "tokens.patch_size=[4,16,16]",
            "tokens.budget=128",
        ),
    },
    views=90_000,
    milestones=(1, 4, 12),
    without=(*TUNED, *REAL_EYES, "surfaces"),
    one_gpu=("one_gpu",),
    one_gpu_people=400,
    one_gpu_seconds=300.0,
    tests=("tests/train", "tests/resume", "tests/pretext", "tests/objectives", "tests/model", "tests/views"),
    read_processes=6,
)

_REHEARSED_STEP = ("smoke_test", *_TINY)
REHEARSAL = Settings(
    name="rehearsal",
    people=24,
    updates=6,
    small=("smoke_test", *_TINY, "monitor.every_updates=5"),
    memory={"one_gpu": _REHEARSED_STEP},
    steps={"small": _REHEARSED_STEP},
    peers=("tiny_cpu_vjepa", "train.global_batch=2", *_TINY, "model.predictor_width=12"),
    gemm_sides=(256, 512),
    repeats=1,
    turns=1,
    loader_updates=4,
    exam=ExamSettings(
        train=24,
        val=6,
        test=24,
        boundaries_train=2,
        boundaries_test=2,
        second_visit=12,
        decoy_train=3,
        decoy_val=1,
        decoy_test=3,
        decoy_ample=4,
        pretraining=24,
    ),
    encoders={
        name: (
            *FULL.encoders[name],
            "train.global_batch=4",
            "model.size=test",
            "model.width=24",
            "model.depth=1",
            "model.heads=2",
            "model.predictor_width=12",
            "model.predictor_depth=1",
            "model.predictor_heads=2",
        )
        for name in FULL.encoders
    },
    views=8,
    milestones=(1, 2, 3),
    without=(*FULL.without, "decoys"),
    one_gpu=("tiny_cpu_vjepa", *_TINY, "train.global_batch=4"),
    one_gpu_people=4,
    one_gpu_seconds=2.0,
    tests=("tests/train/test_step.py",),
    read_processes=2,
    workers=2,
)

SMALLEST = Settings(
    **{
        **REHEARSAL.__dict__,
        "name": "smallest",
        "people": 4,
        "updates": 3,
        "exam": ExamSettings(
            train=6,
            val=2,
            test=6,
            boundaries_train=1,
            boundaries_test=1,
            second_visit=4,
            decoy_train=1,
            decoy_val=1,
            decoy_test=1,
            decoy_ample=2,
            pretraining=8,
        ),
        "encoders": {name: REHEARSAL.encoders[name] for name in ("mae", "vjepa")},
        "milestones": (1, 2),
        "without": (*REHEARSAL.without, "token_lesion", "severity", "same_eye"),
        "one_gpu_people": 2,
        "one_gpu_seconds": 0.1,
        "read_processes": 0,
        "compiled": False,
        "in_process": True,
        "tests": ("tests/views/test_order.py",),
    }
)
