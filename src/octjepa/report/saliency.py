"""Occlusion and token similarity of the eyes of a page, saved in the geometry of the scan as it came.

For each eye two NIfTI files, a value at every voxel of the scan and NaN where there is no token of tissue, and a
figure. The files of `octjepa segment` have the same axes and order of B-scans, so that one can be laid on the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octjepa.errors import UsageError
from octjepa.files import write_atomic
from octjepa.report.contents import Contents
from octjepa.report.occlusion import OccludedVolume, best_device, occluded_cases, occluded_eyes

if TYPE_CHECKING:
    from octjepa.checkpoint import PretrainedEncoder
    from octjepa.store import Store


def write_saliency(contents: Contents, folder: Path) -> list[str]:
    """Writes `ID.occlusion.nii.gz`, `ID.similarity.nii.gz` and `ID.png` of each eye that the page maps; their paths.

    Raises UsageError: no run or fine-tuning, no store, no eye to map, no SimpleITK; what `occluded_eyes` raises.
    """
    store, training = contents.store, contents.training
    if store is None or training is None or contents.kind == "segmentation":
        raise UsageError(f"{contents.root} is no run or fine-tuning with its store: there is no network to explain")
    encoder, occluded = _occluded(contents, store)
    if not occluded:
        raise UsageError("no held-out eye of the store can be mapped: octjepa split sets people aside")
    folder.mkdir(parents=True, exist_ok=True)
    return [str(path) for eye in occluded for path in _write_eye(store, encoder, eye, folder)]


def _occluded(contents: Contents, store: Store) -> tuple[PretrainedEncoder, list[OccludedVolume]]:
    from octjepa.checkpoint import load_encoder
    from octjepa.embed.embedding import require_same_contract
    from octjepa.tasks.finetune.predict import load_tuned

    if contents.kind == "tuning":
        tuned = load_tuned(contents.root, best_device())
        return tuned.encoder, occluded_cases(store, contents.root, tuned)
    assert contents.training is not None
    encoder = load_encoder(contents.training.path).to(best_device())
    require_same_contract(encoder, store, contents.training.path)
    return encoder, occluded_eyes(store, encoder)


def _write_eye(store: Store, encoder: PretrainedEncoder, eye: OccludedVolume, folder: Path) -> list[Path]:
    from octjepa.store.native_mapping import NativeMap
    from octjepa.tasks import native_maps
    from octjepa.tasks.nifti import write_nifti
    from octjepa.tasks.segment.labelled_volumes import frames_reversed

    name = str(eye.row["volume_id"])
    native = NativeMap.from_store(store, name)
    token = native_maps.strongest_token(eye.occlusion)
    grids = {
        "occlusion": native_maps.occlusion_grid(encoder, eye.volume, eye.occlusion),
        "similarity": native_maps.similarity_grid(encoder, eye.volume, token),
    }
    volumes = {kind: native_maps.tokens_to_native(grid, native, encoder.recipe) for kind, grid in grids.items()}
    paths = []
    backwards = frames_reversed(str(eye.row["notes"] or ""))
    for kind, values in volumes.items():
        paths.append(folder / f"{name}.{kind}.nii.gz")
        write_nifti(paths[-1], values[::-1] if backwards else values, native.spacing_mm)
    corner, patch = np.array(native.preprocessing.margin), np.array(encoder.recipe.tokens.patch_size)
    at = native.to_native((corner + (np.array(token) + 0.5) * patch - 0.5)[None])[0]
    number = int(np.clip(np.rint(at[0]), 0, native.shape[0] - 1))
    behind = native_maps.pixels_to_native(np.asarray(eye.volume.pixels), native, number)
    paths.append(folder / f"{name}.png")
    _draw(paths[-1], volumes, behind, number, at, native.spacing_mm, _what_changes(eye))
    return paths


def _what_changes(eye: OccludedVolume) -> str:
    return "what the prediction loses" if eye.caption else "how far the embedding turns (cosine distance)"


def _draw(
    path: Path, volumes: dict[str, np.ndarray], behind: np.ndarray, number: int, at: np.ndarray,
    spacing_mm: tuple[float, float, float], what: str,
) -> None:  # fmt: skip
    """The en face map, and both maps over B-scan `number`, with the token that others are compared with, in mm."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    dz, dy, dx = spacing_mm
    slices, depth, columns = volumes["occlusion"].shape
    most = max(float(np.nanmax(np.abs(volumes["occlusion"]))), 1e-12)
    changes: dict[str, Any] = {"cmap": "PuOr_r", "vmin": -most, "vmax": most}
    figure = Figure(figsize=(11, 4.4), dpi=110, layout="constrained")
    axes = figure.subplot_mosaic([["face", "occlusion"], ["face", "similarity"]], width_ratios=(0.8, 1))
    known = np.isfinite(volumes["occlusion"])
    total, count = np.nan_to_num(volumes["occlusion"]).sum(axis=1), known.sum(axis=1)
    columnwise = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    face_extent = (0.0, columns * dx, slices * dz, 0.0)
    shown = axes["face"].imshow(columnwise, extent=face_extent, interpolation="nearest", **changes)
    axes["face"].axhline((number + 0.5) * dz, color="black", linewidth=0.8)
    axes["face"].set(xlabel="mm", ylabel="mm, across the B-scans")
    figure.colorbar(shown, ax=axes["face"], shrink=0.8)
    extent = (0.0, columns * dx, depth * dy, 0.0)
    options: dict[str, dict[str, Any]] = {"occlusion": changes, "similarity": {"cmap": "viridis", "vmax": 1.0}}
    for kind, values in volumes.items():
        axes[kind].imshow(behind, cmap="gray", extent=extent)
        laid = axes[kind].imshow(values[number], alpha=0.55, extent=extent, interpolation="nearest", **options[kind])
        axes[kind].plot((at[2] + 0.5) * dx, (at[1] + 0.5) * dy, "o", color="white", markeredgecolor="black")
        axes[kind].set(xlabel="mm", ylabel="mm, depth")
        if kind == "similarity":
            figure.colorbar(ScalarMappable(laid.norm, laid.cmap), ax=axes[kind], shrink=0.8)
    titles = {
        "face": f"A column of tokens left out:\n{what}", "occlusion": f"The same over B-scan {number + 1}",
        "similarity": "Cosine with the token marked, the strongest in depth",
    }  # fmt: skip
    for kind, title in titles.items():
        axes[kind].set_title(title, loc="left", fontsize=10)
    write_atomic(path, lambda file: figure.savefig(file, format="png"))
