"""Which eyes get an occlusion map: of a pretraining the held-out ones of the token maps, of a fine-tuning test cases it
got right and wrong. How many there are follows from the work, so that a page does not take long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octjepa.errors import OctjepaError
from octjepa.report.figures import eyes
from octjepa.report.figures.occlusion import OcclusionMaps, Shown, occlusion_maps

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from octjepa.checkpoint import PretrainedEncoder
    from octjepa.store import Store

_FEW = 4
_CASES = 8
_EYES_OF_SCALE = 16
_LEAST = 0.05  # of the unit: what the full colour stands for at the least
_FLOP_A_THREAD = 1e12  # that all maps of a page may cost: about 10 s of one core; 0.08e12 took 0.8 s
_FLOP_ACCELERATOR = 1e15


@dataclass(frozen=True)
class OcclusionPage:
    """The maps, and what their unit is. target: of a fine-tuning; of a quantity, `classes` is false.

    scale_eyes: how many eyes of as many people gave the distances of an encoder their unit. draws: of tokens at random.
    """

    maps: OcclusionMaps
    draws: int
    target: str = ""
    classes: bool = False
    scale_eyes: int = 0


def of_run(store: Store, path: Path) -> OcclusionPage | None:
    """Maps of the embedding for the held-out eyes of the token maps; None where the store holds none.

    Raises OctjepaError: no encoder, too much work for a page, fewer than two held-out people to scale by.
    """
    from octjepa.checkpoint import load_encoder
    from octjepa.tasks import occlusion

    encoder = load_encoder(path).to(_device())
    rows = eyes.one_per_device(store.table, splits=("test", "val"))[:_FEW]
    if not rows:
        return None
    rows = rows[: _affordable(encoder)]
    held_out = [
        row for row in eyes.records(store.table) if row["pattern"] == "raster" and row["split"] in ("test", "val")
    ]
    one_each = {str(row["person_id"]): str(row["volume_id"]) for row in sorted(held_out, key=_by_id, reverse=True)}
    some = sorted(one_each.values())[:_EYES_OF_SCALE]
    unit = occlusion.median_distance(np.stack([encoder.embed(store.read(name), occlusion.POOL) for name in some]))
    if not unit > 0:
        raise OctjepaError(f"{len(some)} held-out people give no distance between eyes to tell changes by")
    volumes = [store.read(str(row["volume_id"])) for row in rows]
    shown = [Shown(row, one, occlusion.encoder_occlusion(encoder, one)) for row, one in zip(rows, volumes, strict=True)]
    maps = occlusion_maps(store, shown, encoder.recipe, _LEAST * unit, unit)
    return OcclusionPage(maps, occlusion.SCATTERED_DRAWS, scale_eyes=len(some))


def of_tuning(store: Store, path: Path) -> OcclusionPage | None:
    """Maps of the answer to the first target, for test volumes; None where none of them has a label.

    Raises OctjepaError: no tuned network, a store made otherwise, too much work for a page, damaged predictions.
    """
    from octjepa.embed.embedding import require_same_contract
    from octjepa.tasks import occlusion
    from octjepa.tasks.finetune.predict import load_tuned

    tuned = load_tuned(path, _device())
    require_same_contract(tuned.encoder, store, path)
    head = tuned.heads[0]
    cases = chosen_cases(_predictions(path / "predictions.parquet"), head.target, head.classes)
    if not cases:
        return None
    of_id = {str(row["volume_id"]): row for row in eyes.records(store.table)}
    shown = []
    for case in cases[: _affordable(tuned.encoder)]:
        volume = store.read(case["volume_id"])
        found = occlusion.tuned_occlusion(tuned, volume, 0, case["predicted"] if head.classes else None)
        shown.append(Shown(of_id[case["volume_id"]], volume, found, case["words"]))
    least = _LEAST * (1.0 if head.classes else head.scale[1])
    return OcclusionPage(
        occlusion_maps(store, shown, tuned.encoder.recipe, least),
        occlusion.SCATTERED_DRAWS,
        head.target,
        bool(head.classes),
    )


def chosen_cases(frame: pd.DataFrame, target: str, classes: Sequence[str]) -> list[dict[str, str]]:
    """Test volumes {volume_id, said, words}: of each class the first by id that was recognised and the first that was
    not; of a quantity that of median error and that of the greatest. Eight at most."""
    rows = [
        row
        for row in sorted(eyes.records(frame), key=_by_id)
        if (row["level"], row["target"], row["split"]) == ("volume", target, "test") and row["truth"] != ""
    ]
    if not classes:
        rows.sort(key=lambda row: abs(float(row["predicted"]) - float(row["truth"])))
        picked = [(rows[(len(rows) - 1) // 2], "median error"), (rows[-1], "greatest error")] if rows else []
        return [
            _case(row, f"{kind}: said {float(row['said']):.3g}, true {float(row['truth']):.3g}")
            for row, kind in picked[: len(rows)]
        ]
    found = []
    for name in classes:
        for right in (True, False):
            some = [row for row in rows if row["truth"] == name and (row["predicted"] == name) == right]
            if some:
                chance = float(some[0]["scores"][list(classes).index(some[0]["predicted"])])
                verdict = "right" if right else f"wrong, it is {name}"
                found.append(_case(some[0], f"said {some[0]['said']} with {chance:.2f}: {verdict}"))
    return found[:_CASES]


def _case(row: Mapping[str, Any], words: str) -> dict[str, str]:
    return {"volume_id": str(row["volume_id"]), "predicted": str(row["predicted"]), "words": words}


def _by_id(row: Mapping[str, Any]) -> str:
    return str(row["volume_id"])


def _predictions(path: Path) -> pd.DataFrame:
    import pandas as pd
    import pyarrow as pa

    try:
        return pd.read_parquet(path, columns=["level", "target", "split", "volume_id", "truth", "predicted", "scores"])
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise OctjepaError(f"{path.name} cannot be read ({str(error).splitlines()[0]})") from None


def _device() -> torch.device:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def _affordable(encoder: PretrainedEncoder) -> int:
    """How many eyes a page may map with `encoder`. Raises OctjepaError: none."""
    import torch

    from octjepa.tasks.occlusion import forward_passes

    on_cpu = next(encoder.encoder.parameters()).device.type == "cpu"
    most = _FLOP_A_THREAD * torch.get_num_threads() if on_cpu else _FLOP_ACCELERATOR
    recipe = encoder.recipe
    one = 2.0 * encoder.parameters * recipe.token_count * forward_passes(recipe.grid)
    if one > most:
        raise OctjepaError(
            f"the map of an eye costs {one / 1e12:.0f} TFLOP, more than the {most / 1e12:.0f} that a page may take on "
            "this machine: make the report on one with an accelerator, or call octjepa.tasks.occlusion"
        )
    return int(most / one)
