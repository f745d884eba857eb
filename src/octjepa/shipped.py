"""Data that comes with the package: encoders by name, and the files of the repository that a wheel
holds.
"""

from __future__ import annotations

from pathlib import Path

SEGMENTER = "phantom-unet"  # the segmentation network as an encoder, which `octjepa.open_encoder` opens
_FOLDER = Path(__file__).with_name("weights")


def shipped_names() -> list[str]:
    """Names of the encoders in the package that have weights of their own."""
    return sorted(folder.name for folder in _FOLDER.glob("*") if (folder / "model.safetensors").is_file())


def packaged_encoders() -> list[str]:
    """Names that `octjepa.open_encoder` finds in the package: `shipped_names` and the segmentation network."""
    return [*shipped_names(), SEGMENTER]


def shipped(name: str | Path) -> Path | None:
    """The folder of the weights `name`; None where the package has none, or where a path of that name exists."""
    if str(name) not in shipped_names() or Path(name).exists():
        return None
    return _FOLDER / str(name)


def is_segmenter(location: str | Path) -> bool:
    """Whether `location` is the name of the segmentation network as an encoder, and no path of that name exists."""
    return str(location) == SEGMENTER and not Path(location).exists()


def shipped_files() -> Path:
    """The folder of `constraints.txt`, `scripts/launch` and `scripts/licences`: the checkout, or the wheel's own."""
    inside = Path(__file__).with_name("shipped_files")
    return inside if inside.is_dir() else Path(__file__).parents[2]


if __name__ == "__main__":
    print(shipped_files())
