"""Whether torch_xla is asked for, and what is said where it is missing; these need no torch_xla."""

from __future__ import annotations

import importlib.util

import pytest

from octjepa.distributed import xla
from octjepa.errors import UsageError


@pytest.mark.parametrize(("platform", "requested"), [("", False), ("CPU", True), ("TPU", True)])
def test_pjrt_device_reports_whether(platform: str, requested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", platform)
    assert xla.is_requested() is requested
    monkeypatch.delenv("PJRT_DEVICE")
    assert xla.is_requested() is False


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    with pytest.raises(UsageError, match="PJRT_DEVICE=CUDA: octjepa uses torch_xla only for TPU or CPU"):
        xla.is_requested()


def test_without_the_library_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("torch_xla") is not None:
        pytest.skip("torch_xla is installed here")
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(UsageError, match=r"PJRT_DEVICE=TPU asks for torch_xla.*docs/launch\.md.*unset PJRT_DEVICE"):
        xla.device()
