"""The installation: Python, the libraries octjepa needs, its extras, its own code."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator

from octjepa.doctor.check import Check
from octjepa.extras import to_install
from octjepa.train.run_folder import code_hash

_NEED = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?(?P<limits>[^;]*)(?:;.*extra == ['\"](?P<extra>[\w-]+))?")
_OLDEST_PYTHON = (3, 11)


def checks() -> Iterator[Check]:
    by_extra: dict[str, list[tuple[str, str]]] = {}
    for need in importlib.metadata.requires("octjepa") or ():
        parts = _NEED.match(need)
        if parts is not None and parts["name"] != "octjepa":
            by_extra.setdefault(parts["extra"] or "", []).append((parts["name"], parts["limits"].strip(" ()")))
    wanted = "3.11 or newer"
    fine = sys.version_info >= _OLDEST_PYTHON
    yield Check(
        "python", "ok" if fine else "failed", platform.python_version(), wanted, "" if fine else f"use {wanted}"
    )
    yield Check("octjepa", "ok", f"{importlib.metadata.version('octjepa')}, code {code_hash()[:12]}",
                "the same code on every machine of a run: compare this hash")  # fmt: skip
    yield _needed(by_extra.pop("", []))
    for extra, needs in sorted(by_extra.items()):
        if extra != "dev":
            yield _extra(extra, needs)


def _needed(needs: list[tuple[str, str]]) -> Check:
    wrong = [fault for name, limits in needs if (fault := _fault(name, limits))]
    expected = f"{len(needs)} libraries within their limits"
    if wrong:
        return Check(
            "libraries",
            "failed",
            "; ".join(wrong),
            expected,
            "make setup in the checkout, or pip install --upgrade octjepa",
        )
    shown = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "pydicom"))
    return Check("libraries", "ok", shown, expected)


def _extra(extra: str, needs: list[tuple[str, str]]) -> Check:
    name, to_do = f"extra {extra}", to_install(extra)
    faults = [fault for need, limits in needs if (fault := _fault(need, limits))]
    if not faults:
        found = ", ".join(f"{need} {importlib.metadata.version(need)}" for need, _ in needs)
        return Check(name, "ok", found, "optional")
    whole = all(fault.endswith("is not installed") for fault in faults) and len(faults) == len(needs)
    return Check(name, "ok" if whole else "warning", "; ".join(faults), "optional", to_do)


def _fault(name: str, limits: str) -> str:
    """What is wrong with the library `name`, or nothing. `limits` are those of pyproject.toml: >= and <."""
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed"
    for sign, limit in re.findall(r"(>=|<)\s*([\w.]+)", limits):
        if (_numbers(found) >= _numbers(limit)) != (sign == ">="):
            return f"{name} {found} is not {sign} {limit}"
    return ""


def _numbers(version: str) -> list[int]:
    release = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in release[0].split(".")] if release else []
