"""The processor and the memory of a machine, with pretended files of Linux."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from octjepa import machine

GIB = 1 << 30


def test_the_processor_without_and_with_a_list_of_its_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    assert machine.processor() == machine.Processor(platform.machine())
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 sse\nbugs\t\t: spectre_v1\n")
    found = machine.processor()
    assert found.instruction_sets == {"fpu", "avx512_bf16", "sse"}
    assert found.bf16_sets == ("avx512_bf16",)


def test_a_container_limits_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_physical_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable:   {32 * GIB // 1024} kB\n")
    assert machine.free_memory_bytes() == 32 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    (tmp_path / "memory.stat").write_text("anon 1\nfile 2\n")
    assert machine.free_memory_bytes() == 32 * GIB
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    assert machine.free_memory_bytes() == 7 * GIB
    (tmp_path / "memory.current").write_text(f"{8 * GIB}\n")  # full of the pages of files that were read
    (tmp_path / "memory.stat").write_text(f"anon {2 * GIB}\ninactive_file {5 * GIB}\nactive_file {GIB}\n")
    assert machine.free_memory_bytes() == 5 * GIB


def test_a_container_of_the_first_version_limits_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_physical_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "absent")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(f"{6 * GIB}\n")
    (tmp_path / "memory" / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    assert machine.free_memory_bytes() == 3 * GIB


def test_the_limit_is_the_least_of_machine_shell_and_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_physical_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda limit: (machine.resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    limit = machine.memory_limit_bytes.__wrapped__
    assert limit() == 64 * GIB
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    assert limit() == 8 * GIB
    monkeypatch.setattr(machine.resource, "getrlimit", lambda limit: (GIB, GIB))
    assert limit() == GIB


def test_this_process_uses_memory_and_may_use_a_core() -> None:
    assert 1 << 20 < machine.process_memory_bytes() < machine.memory_limit_bytes.__wrapped__()
    assert machine.cores() >= 1


def test_gpus_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_DEVICES", tmp_path)
    assert machine.gpu_count() == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert machine.gpu_count() == 2
