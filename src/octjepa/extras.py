"""How an optional library is installed, said the same way by every message that misses one."""

from __future__ import annotations

import importlib.metadata
import json


def to_install(extra: str) -> str:
    """The command that adds `extra` to this installation of octjepa.

    A checkout is told to install from itself, with its pinned versions: an index may hold another package of the name.
    """
    if _from_checkout():
        return f'pip install -c constraints.txt -e ".[{extra}]", in the checkout'
    return f'pip install "octjepa[{extra}]"'


def _from_checkout() -> bool:
    try:
        origin = importlib.metadata.distribution("octjepa").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:  # run from its sources, not installed
        return True
    return origin is not None and bool(json.loads(origin).get("dir_info", {}).get("editable"))
