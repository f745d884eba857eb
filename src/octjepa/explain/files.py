"""Occlusion and token similarity of the eyes of a page, saved in the geometry of the scan as it came.

For each eye two NIfTI files, a value at every voxel of the scan and NaN if there is no token of tissue, and a picture.
The files of `octjepa segment` have the same axes and order of B-scans, so that one can be laid on the other.
"""

from __future__ import annotations

import logging
from pathlib import Path

from octjepa.errors import UsageError
from octjepa.explain.attention import TokenAttention, read_attention
from octjepa.explain.eyes import ExplainedEyes, OccludedVolume
from octjepa.explain.figures import write_attention_maps, write_figure
from octjepa.explain.occlusion import occlusion_grid, strongest_token
from octjepa.explain.similarity import similarity_grid
from octjepa.explain.writer import NativeWriter
from octjepa.store import Store
from octjepa.tasks.finetune.network import TunableEncoder
from octjepa.tasks.finetune.predict import TunedModel

_log = logging.getLogger(__name__)


def write_maps(store: Store, explained: ExplainedEyes, folder: Path, attention: Path | None = None) -> list[str]:
    """Writes `ID.occlusion.nii.gz`, `ID.similarity.nii.gz` and `ID.png` of each eye; their paths.

    Of a fine-tuning also where each target's head looks; else where a probe does whose `attention` is given, a file of
    `octjepa probe --attention`. Eyes whose voxels ingest turned are left out, unless there is no other. Raises
    UsageError: no eye to map, attention of other eyes.
    """
    if not explained.eyes:
        raise UsageError(
            "the store has no raster scan in val or test to map: run `octjepa split`"
            if explained.tuned is None
            else "the fine-tuning has no labelled test scan of its first target to map"
        )
    maps: dict[str, list[TokenAttention]] = {}
    if attention is not None:
        maps = read_attention(attention, [eye.row.volume_id for eye in explained.eyes])
    folder.mkdir(parents=True, exist_ok=True)
    paths, refusals = list[str](), list[UsageError]()
    for eye in explained.eyes:
        try:
            writer = NativeWriter.open(store, eye, explained.encoder.recipe, folder)
        except UsageError as error:
            _log.warning("no maps of %s: %s", eye.row.volume_id, error)
            refusals.append(error)
            continue
        _write_eye(explained.encoder, eye, writer)
        tuned = explained.tuned
        eye_attention = maps.get(eye.row.volume_id, []) if tuned is None else _tuned_attention(tuned, eye)
        write_attention_maps(writer, eye_attention)
        paths += map(str, writer.paths)
    if not paths:
        raise refusals[0]
    return paths


def _tuned_attention(tuned: TunedModel, eye: OccludedVolume) -> list[TokenAttention]:
    """Where the query of each target of a fine-tuning looks."""
    grid_index, shares = tuned.network.attention(eye.volume)
    return [
        TokenAttention(head.target, False, tuned.encoder.recipe.grid, grid_index, share)
        for head, share in zip(tuned.heads, shares, strict=True)
    ]


def _write_eye(encoder: TunableEncoder, eye: OccludedVolume, writer: NativeWriter) -> None:
    token = strongest_token(eye.occlusion)
    grids = {
        "occlusion": occlusion_grid(encoder, eye.volume, eye.occlusion),
        "similarity": similarity_grid(encoder, eye.volume, token),
    }
    write_figure(writer, {kind: writer.write_map(kind, grid) for kind, grid in grids.items()}, token)
