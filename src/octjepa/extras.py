"""How to install an optional library, in the same words in every message."""

from __future__ import annotations

import importlib.metadata
import json


def install_command(extra: str) -> str:
    """The command that adds `extra` to this installation of octjepa.

    In a checkout it installs from the checkout, with pinned versions: an index may hold another package of the name.
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
