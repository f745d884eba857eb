"""Occlusion and token similarity of the eyes of a page, saved in the geometry of the scan as it came.

For each eye two NIfTI files, a value at every voxel of the scan and NaN where there is no token of tissue, and a
figure. The files of `octjepa segment` have the same axes and order of B-scans, so that one can be laid on the other.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from octjepa.errors import UsageError
from octjepa.evaluate.attention_maps import TokenAttention, read_attention
from octjepa.report.attention_figure import write_attention_maps
from octjepa.report.contents import Contents
from octjepa.report.native_writer import NativeWriter
from octjepa.report.occlusion import OccludedVolume, best_device, occluded_cases, occluded_eyes

if TYPE_CHECKING:
    from octjepa.store import Store
    from octjepa.tasks.finetune.network import TunableEncoder
    from octjepa.tasks.finetune.predict import TunedModel

_log = logging.getLogger(__name__)


def write_saliency(contents: Contents, folder: Path, attention: Path | None = None) -> list[str]:
    """Writes `ID.occlusion.nii.gz`, `ID.similarity.nii.gz` and `ID.png` of each eye that the page maps; their paths.

    Of a fine-tuning also where each target's head looks, and of a run where a probe does whose `attention` is given, a
    file of `octjepa probe --attention` (`attention_figure`). Eyes whose voxels ingest turned are left out, unless there
    is no other. Raises UsageError: no run or fine-tuning, no store, no eye to map, attention of other
    eyes, or beside a fine-tuning; what `occluded_eyes` raises.
    """
    store, training = contents.store, contents.training
    if store is None or training is None or contents.kind == "segmentation":
        raise UsageError(f"{contents.root} is no run or fine-tuning with its store: there is no network to explain")
    if attention is not None and contents.kind == "tuning":
        raise UsageError("a fine-tuning has an attention of its own: --attention is that of a probe on a run's encoder")
    encoder, occluded, tuned = _occluded(contents, store)
    if not occluded:
        raise UsageError("no held-out eye of the store can be mapped: octjepa split sets people aside")
    maps: dict[str, list[TokenAttention]] = {}
    if attention is not None:
        maps = read_attention(attention, [str(eye.row["volume_id"]) for eye in occluded])
    folder.mkdir(parents=True, exist_ok=True)
    paths, refusals = list[str](), list[UsageError]()
    for eye in occluded:
        try:
            writer = NativeWriter.open(store, eye, encoder.recipe, folder)
        except UsageError as error:
            _log.warning("no maps of %s: %s", eye.row["volume_id"], error)
            refusals.append(error)
            continue
        _write_eye(encoder, eye, writer)
        own = maps.get(str(eye.row["volume_id"]), []) if tuned is None else _tuned_attention(tuned, eye)
        write_attention_maps(writer, own)
        paths += map(str, writer.paths)
    if not paths:
        raise refusals[0]
    return paths


def _occluded(contents: Contents, store: Store) -> tuple[TunableEncoder, list[OccludedVolume], TunedModel | None]:
    from octjepa.embed.embedding import require_same_contract
    from octjepa.encoders import load_encoder
    from octjepa.tasks.finetune.predict import load_tuned

    if contents.kind == "tuning":
        tuned = load_tuned(contents.root, best_device())
        return tuned.encoder, occluded_cases(store, contents.root, tuned), tuned
    assert contents.training is not None
    encoder = load_encoder(contents.training.path).to(best_device())
    require_same_contract(encoder, store, contents.training.path)
    return encoder, occluded_eyes(store, encoder), None


def _tuned_attention(tuned: TunedModel, eye: OccludedVolume) -> list[TokenAttention]:
    """Where the query of each target of a fine-tuning looks."""
    grid_index, shares = tuned.network.attention(eye.volume)
    return [
        TokenAttention(head.target, False, tuned.encoder.recipe.grid, grid_index, share)
        for head, share in zip(tuned.heads, shares, strict=True)
    ]


def _write_eye(encoder: TunableEncoder, eye: OccludedVolume, writer: NativeWriter) -> None:
    from octjepa.tasks import native_maps

    token = native_maps.strongest_token(eye.occlusion)
    grids = {
        "occlusion": native_maps.occlusion_grid(encoder, eye.volume, eye.occlusion),
        "similarity": native_maps.similarity_grid(encoder, eye.volume, token),
    }
    _write_figure(writer, {kind: writer.write_map(kind, grid) for kind, grid in grids.items()}, token)


def _what_changes(eye: OccludedVolume) -> str:
    return "what the prediction loses" if eye.caption else "how far the embedding turns (cosine distance)"


def _write_figure(
    writer: NativeWriter, volumes: dict[str, Float[np.ndarray, "N R C"]], token: tuple[int, int, int]
) -> None:
    """The en face map, and both maps over the B-scan of `token`, with which others are compared, in mm."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    at, (dz, dy, dx) = writer.centre(token), writer.native.spacing_mm
    number, (face_extent, extent) = writer.nearest_b_scan(at), writer.extents()
    behind = writer.b_scan(number)
    most = max(float(np.nanmax(np.abs(volumes["occlusion"]))), 1e-12)
    changes: dict[str, Any] = {"cmap": "PuOr_r", "vmin": -most, "vmax": most}
    figure = Figure(figsize=(11, 4.4), dpi=110, layout="constrained")
    axes = figure.subplot_mosaic([["face", "occlusion"], ["face", "similarity"]], width_ratios=(0.8, 1))
    known = np.isfinite(volumes["occlusion"])
    total, count = np.nan_to_num(volumes["occlusion"]).sum(axis=1), known.sum(axis=1)
    columnwise = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    shown = axes["face"].imshow(columnwise, extent=face_extent, interpolation="nearest", **changes)
    axes["face"].axhline((number + 0.5) * dz, color="black", linewidth=0.8)
    axes["face"].set(xlabel="mm", ylabel="mm, across the B-scans")
    figure.colorbar(shown, ax=axes["face"], shrink=0.8)
    options: dict[str, dict[str, Any]] = {"occlusion": changes, "similarity": {"cmap": "viridis", "vmax": 1.0}}
    for kind, values in volumes.items():
        axes[kind].imshow(behind, cmap="gray", extent=extent)
        laid = axes[kind].imshow(values[number], alpha=0.55, extent=extent, interpolation="nearest", **options[kind])
        axes[kind].plot((at[2] + 0.5) * dx, (at[1] + 0.5) * dy, "o", color="white", markeredgecolor="black")
        axes[kind].set(xlabel="mm", ylabel="mm, depth")
        if kind == "similarity":
            figure.colorbar(ScalarMappable(laid.norm, laid.cmap), ax=axes[kind], shrink=0.8)
    titles = {
        "face": f"A column of tokens left out:\n{_what_changes(writer.eye)}",
        "occlusion": f"The same over B-scan {number + 1}",
        "similarity": "Cosine with the token marked, the strongest in depth",
    }  # fmt: skip
    for kind, title in titles.items():
        axes[kind].set_title(title, loc="left", fontsize=10)
    writer.write_figure(figure)
