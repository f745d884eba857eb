"""Lists in the viewer that open a scan: who was misread, and the nearest neighbours of an eye; the head's overlay."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from octjepa import load_encoder
from octjepa.embed.table import TableFacts, write_embeddings
from octjepa.errors import UsageError
from octjepa.ingest.build import build_store
from octjepa.phantom import write_cohort
from octjepa.record import to_json
from octjepa.store import Store
from octjepa.tasks.labels.layer_names import CLASS_COLOURS
from octjepa.tasks.segment.folder import SavedHead
from octjepa.tasks.segment.linear import LinearHead
from octjepa.tasks.segment.recipe import SegmentRecipe
from octjepa.viewer.misread import CasePredictions
from octjepa.viewer.neighbours import NEAREST, Neighbours
from octjepa.viewer.scans import Scans
from octjepa.viewer.server import open_scans
from octjepa.viewer.voxel_classes import ClassColour, Legend, VoxelClasses
from octjepa.volume import CanonicalVolume

pytest.importorskip("starlette")
NODE = shutil.which("node")


def case(volume_id: str, truth: str, predicted: str, scores: list[float], **other: Any) -> dict[str, Any]:
    return {
        "level": "volume",
        "target": "drusen",
        "split": "test",
        "person_id": "1",
        "eye": "OD",
        "volume_id": volume_id,
        "volumes": 1,
        "truth": truth,
        "predicted": predicted,
        "classes": ["no", "yes"],
        "scores": scores,
        **other,
    }


@pytest.fixture
def predictions(tmp_path: Path) -> Path:
    rows = [
        case("a", "no", "yes", [0.4, 0.6]),
        case("b", "no", "yes", [0.1, 0.9]),
        case("c", "yes", "yes", [0.2, 0.8]),
        case("d", "no", "yes", [0.0, 1.0], split="val"),
        case("", "no", "yes", [0.0, 1.0], level="person"),
        case("a", "60.0", "40.0", [40.0], target="age", classes=[]),
        case("b", "61.0", "64.5", [64.5], target="age", classes=[]),
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "predictions.parquet")
    return tmp_path / "predictions.parquet"


def test_the_most_confident_mistakes_come_first(predictions: Path) -> None:
    cases = CasePredictions(predictions, {"b": 3})
    assert cases.targets == ["drusen", "age"]
    found = cases.misread("drusen")
    assert (found.has_classes, found.cases, found.misread) == (True, 3, 2)
    assert to_json(found.volumes) == [
        {"id": "b", "person": 3, "eye": "OD", "true": "no", "predicted": "yes", "score": 0.9, "shown": True},
        {"id": "a", "person": 0, "eye": "OD", "true": "no", "predicted": "yes", "score": 0.6, "shown": False},
    ]
    assert [(one.id, one.score) for one in cases.misread("age").volumes] == [("a", -20.0), ("b", 3.5)]
    with pytest.raises(KeyError):
        cases.misread("sex")
    assert CasePredictions(None).targets == []


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="no table of predictions"):
        CasePredictions(tmp_path / "x.parquet")


@pytest.mark.slow
def test_the_probe_writes_what_the_viewer_lists(
    cohort: Callable[..., Any], saved: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    from command_line import call

    frame, labels = cohort(people=40)
    table, tsv = saved(frame, labels)
    out = tmp_path / "cases.parquet"
    done = call(
        "probe", table, "--labels", tsv, "--target", "lesion0", "--probe", "linear", "--predictions", out, "--json"
    )
    assert done.code == 0, done.err
    found = CasePredictions(out, dict.fromkeys(frame["volume_id"], 1)).misread("lesion0")
    (counts,) = [
        one["counts"]
        for one in done.json["confusions"]
        if (one["name"], one["probe"], one["pool"]) == ("octjepa", "linear", "mean_std_max")
    ]
    counts = np.array(counts)
    assert found.cases == counts.sum()
    assert found.misread == counts.sum() - np.trace(counts)
    truth = dict(zip(frame["volume_id"], labels["lesion0"].astype(str), strict=True))
    assert all(truth[one.id] == one.truth != one.predicted for one in found.volumes)


def test_neighbours_are_other_people_and_the_own_other_eye_is_ranked(
    cohort: Callable[..., Any], tmp_path: Path
) -> None:
    frame, _ = cohort(people=12, dim=2)
    vectors = np.random.default_rng(0).normal(size=(len(frame), 6)).astype(np.float32)
    vectors[0], vectors[1], vectors[7], vectors[6] = [1, 0] * 3, [1, 0.3] * 3, [2, 0.1] * 3, [2, 0.2] * 3
    table = write_embeddings(
        tmp_path / "e.parquet", frame.assign(vector=list(vectors)), TableFacts(2, "ours", "c" * 64)
    )
    names = frame["volume_id"].tolist()
    found = Neighbours(table, {name: 1 + number // 2 for number, name in enumerate(names[:8])}).nearest(names[0])
    others = [one.id for one in found.others]
    assert others[0] == names[7]  # both eyes of one person are near: one is listed
    assert names[6] not in others
    assert names[1] not in others
    assert len(others) == NEAREST
    assert found.people == 11
    assert [(one.id, one.nearer) for one in found.same_person] == [(names[1], 1)]
    cosines = [one.cosine for one in found.others]
    assert cosines == sorted(cosines, reverse=True)
    assert [one.person for one in found.others] == [
        {name: 1 + n // 2 for n, name in enumerate(names[:8])}.get(name, 0) for name in others
    ]
    for missing in (Neighbours(None), Neighbours(table)):
        with pytest.raises(KeyError):
            missing.nearest("not there")


@pytest.mark.skipif(NODE is None, reason="no node on this machine")
@pytest.mark.parametrize(("eye", "others", "is_named"), [("OD", "OS", True), ("OD", "", False), ("", "OS", False)])
def test_the_page_names_the_other_eye_only_if_both_sides_are_known(eye: str, others: str, is_named: bool) -> None:
    module = files("octjepa.viewer").joinpath("static", "cases.js").read_text(encoding="utf-8")
    own = {"id": "b", "person": 1, "eye": others, "device": "zeiss_cirrus", "cosine": 0.9, "shown": True, "nearer": 0}
    found = {"encoder": "ours", "pool": "mean", "people": 11, "eye": eye, "others": [], "own": [own]}
    script = (
        "const nodes = {}, at = (id) => (nodes[id] ??= { replaceChildren(...items) { this.items = items; } });"
        "const plain = String, titleOf = (row) => row.device;"
        "const make = (name, text) => ({ text, dataset: {}, append() {}, addEventListener() {} });"
        + re.sub(r"^import .*$", "", module, flags=re.MULTILINE)
        + f"Nearest.prototype.list.call({{}}, {json.dumps(found)});"
        + "console.log(JSON.stringify([nodes['near-state'].textContent, nodes['near-list'].items.length]));"
    )
    assert NODE is not None
    run = subprocess.run([NODE, "--input-type=module"], input=script, capture_output=True, text=True, check=True)
    text, listed = json.loads(run.stdout)
    assert ("own other eye" in text, listed) == (is_named, int(is_named))


@pytest.mark.slow
def test_the_segmentation_of_a_head_is_laid_over_the_scan_as_it_came(tmp_path: Path) -> None:
    preprocessing = load_encoder("phantom-tiny").recipe.preprocessing
    write_cohort(tmp_path / "eyes", people=1, seed=3, devices=["zeiss_cirrus"], size="small", workers=1)
    build_store([tmp_path / "eyes"], tmp_path / "store", preprocessing)

    class TissueHead(LinearHead):
        """Calls the tissue band of a stored volume class 1: a mask that is known."""

        def __init__(self) -> None:
            pass

        def scores(self, volume: CanonicalVolume) -> np.ndarray:
            depth = np.arange(volume.pixels.shape[1])[None, :, None]
            band = np.asarray(volume.band)[:, :, None]
            inside = (depth >= band[0]) & (depth < band[1]) & (band[0] >= 0)
            return np.stack([~inside, inside]).astype(np.float32)

    head = SavedHead(TissueHead(), ("tissue",), SegmentRecipe(name="t"), load_encoder("phantom-tiny"))
    files = open_scans(tmp_path / "store")
    name = min(files.ids)
    scan = files.native(name)
    shown = Scans(Store.open(tmp_path / "store"), native=files.files, classes=VoxelClasses(lambda: head, None))
    assert shown.native_about(name).to_json()["layers"] == ["fluid", "segmentation"]
    assert shown.legend(name, "segmentation") == Legend(
        "Predicted by the segmentation head.", [ClassColour("tissue", CLASS_COLOURS[0])]
    )
    number, column = scan.opening_slice, scan.volume.shape[2] // 2
    painted = np.asarray(Image.open(io.BytesIO(shown.overlay_png(name, "segmentation", number))))
    assert painted.shape == (*scan.volume.shape[1:], 4)
    ilm, _, lower = scan.surfaces[:, number, column]
    (inside,) = np.nonzero(painted[:, column, 3])
    assert abs(inside[0] - ilm) < 4
    assert abs(inside[-1] - lower) < 4
    assert painted[inside[len(inside) // 2], column, :3].tolist() == list(CLASS_COLOURS[0])
    with pytest.raises(IndexError):
        shown.overlay_png(name, "segmentation", scan.volume.shape[0])
