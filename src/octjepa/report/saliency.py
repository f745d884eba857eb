"""The maps of a page's eyes, saved in the geometry of the scan as it came (`octjepa.explain`)."""

from __future__ import annotations

from pathlib import Path

from octjepa.errors import UsageError
from octjepa.explain.eyes import explain_encoder, explain_tuning
from octjepa.explain.files import write_maps
from octjepa.report.contents import Contents


def write_saliency(contents: Contents, folder: Path, attention: Path | None = None) -> list[str]:
    """Writes the maps of each eye that the page maps, as `explain.files.write_maps` does; their paths.

    Raises UsageError: no run or fine-tuning, no store, no eye to map, attention of other eyes, or next to a
    fine-tuning; what `eyes.occluded_eyes` raises.
    """
    store, training = contents.store, contents.training
    if store is None or training is None or contents.kind == "segmentation":
        raise UsageError(f"{contents.root} is not a run or fine-tuning with its store: there is no network to explain")
    if attention is not None and contents.kind == "tuning":
        raise UsageError("a fine-tuning has its attention: --attention is that of a probe on a run's encoder")
    explained = (
        explain_tuning(store, contents.root) if contents.kind == "tuning" else explain_encoder(store, training.path)
    )
    return write_maps(store, explained, folder, attention)
