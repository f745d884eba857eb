"""Encoders that come with the package, by name: usable offline, right after installation."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).with_name("weights")


def shipped_names() -> list[str]:
    """Names of the encoders in the package."""
    return sorted(folder.name for folder in _FOLDER.glob("*") if (folder / "model.safetensors").is_file())


def shipped(name: str | Path) -> Path | None:
    """The folder of the weights `name`; None where the package has none, or where a path of that name exists."""
    if str(name) not in shipped_names() or Path(name).exists():
        return None
    return _FOLDER / str(name)
