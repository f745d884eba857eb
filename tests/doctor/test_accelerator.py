"""A GPU that cannot be used is one line that says what was found and what to do. No GPU is needed for these tests."""

from __future__ import annotations

import pytest
import torch

from octjepa.doctor import accelerator
from octjepa.doctor.accelerator import accelerator_checks

GB = 10**9


@pytest.fixture
def card(monkeypatch):
    """Has torch report one card as it is called."""

    def report(capability=(9, 0), free=79 * GB, total=80 * GB, error=None):
        def memory(index):
            if error is not None:
                raise RuntimeError(error)
            return free, total

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", memory)

    return report


@pytest.mark.parametrize(
    ("described", "needed", "state", "found", "to_do"),
    [
        ({}, None, "ok", "GPU 0, a card, compute capability 9.0, 79.0 GB of 80.0 GB free", ""),
        ({"capability": (6, 1)}, None, "failed", "too old for this torch, which needs 7.0", "newer GPU"),
        ({"capability": (7, 5)}, None, "warning", "no bf16 before 8.0", "train.precision=fp32"),
        ({"free": 4 * GB, "total": 4 * GB}, None, "warning", "too small for 6.0 GB", "machine.micro_batch"),
        ({"free": 24 * GB, "total": 24 * GB}, 30 * GB, "failed", "too small for 30.0 GB", "machine.recompute=true"),
        ({"free": 50 * GB}, 10 * GB, "warning", "30.0 GB are taken by other processes", "nvidia-smi"),
        ({"free": 5 * GB}, 10 * GB, "failed", "75.0 GB are taken by other processes", "nvidia-smi"),
        (
            {"error": "CUDA error: busy or unavailable"},
            None,
            "failed",
            "cannot be opened: CUDA error",
            "another process",
        ),
    ],
)
def test_what_keeps_a_card_from_being_used_is_one_line(card, described, needed, state, found, to_do):
    card(**described)
    (check,) = accelerator_checks(needed)
    assert (check.state, found in check.found, to_do in check.to_do) == (state, True, True), check
    assert "\n" not in check.found


def test_without_a_card_nothing_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accelerator, "DEVICE_FILE", tmp_path / "none")
    (check,) = accelerator_checks()
    assert (check.state, check.to_do) == ("ok", "")


def test_a_card_without_a_working_driver_or_a_torch_for_it_says_which(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(accelerator, "DEVICE_FILE", tmp_path / "nvidia0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    (check,) = accelerator_checks()
    assert "is a build for the CPU" in check.found
    assert "CUDA build of torch" in check.to_do

    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 11040)")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    (check,) = accelerator_checks()
    assert check.state == "failed"
    assert "cannot use it: The NVIDIA driver on your system is too old (found version 11040)" in check.found
    assert "nvidia-smi" in check.to_do
