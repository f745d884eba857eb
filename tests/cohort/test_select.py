"""Criteria: each leaves out what it says, is counted in the flow, and an empty choice says who took the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pydantic import ValidationError

from index_entries import index_entry, store_of
from oct_dicom import make_dataset, retina, save
from octjepa.cohort.flow import count_entries
from octjepa.cohort.selection import check_not_empty, select
from octjepa.errors import UsageError
from octjepa.ingest import build_store
from octjepa.recipe import DataRecipe, Preprocessing
from octjepa.store import Store

# Ten training volumes; each says something that none of the others does.
MESSAGE: list[dict[str, Any]] = [
    {"device": "zeiss_cirrus"},
    {"site": "UAB"},
    {"region": "Optic Disc"},
    {"eye": ""},
    {"format": "nifti"},
    {"pattern": "radial"},
    {"native_d": 7},
    {"spacing_z_mm": 0.3},
    {"quality": 0.2},
    {"notes": "blank_frames=3;person_unknown", "uncertain": "slice;depth"},
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    rows = [index_entry(2 * number, split="train", **message) for number, message in enumerate(MESSAGE)]
    return store_of(tmp_path / "store", [*rows, index_entry(40, split="val")])


def left_out(store: Store, **criteria: Any) -> list[int]:
    """Positions in SAID of what the criteria leave out."""
    retained = set(select(store, DataRecipe(**criteria), "train").volume_ids)
    return [number for number in range(len(MESSAGE)) if index_entry(2 * number)["volume_id"] not in retained]


EVERY_PATTERN: dict[str, Any] = {"patterns": ["raster", "radial"]}


@pytest.mark.parametrize(
    ("criteria", "expected"),
    [
        ({}, []),
        ({"devices": ["topcon_triton"]}, [0]),
        ({"strategy": "single_domain", "device": "zeiss_cirrus"}, list(range(1, 10))),
        ({"sites": ["unknown"]}, [1]),
        ({"sites": ["uab"]}, [0, *range(2, 10)]),
        ({"regions": ["macula"]}, [2]),
        ({"lateralities": ["OD", "OS"]}, [3]),
        ({"formats": ["dicom"]}, [4]),
        ({"patterns": ["raster"]}, [5]),
        ({"min_frames": 8}, [6]),
        ({"min_frames": 7, "max_frames": 60, "min_quality": 0.2}, []),
        ({"max_spacing_mm": [0.3, None, None], "min_spacing_mm": [0.12, None, None]}, []),
        ({"max_frames": 7}, [0, 1, 2, 3, 4, 5, 7, 8, 9]),
        ({"max_spacing_mm": [0.2, None, None]}, [7]),
        ({"min_spacing_mm": [0.2, None, 0.001]}, [0, 1, 2, 3, 4, 5, 6, 8, 9]),
        ({"min_quality": 0.5}, [8]),
        ({"exclude_notes": ["person_unknown"]}, [9]),
        ({"exclude_notes": ["blank_frames"]}, [9]),
        ({"exclude_uncertain": ["depth"]}, [9]),
        ({"exclude_uncertain": ["column"]}, []),
        ({"devices": ["topcon_triton"], "min_quality": 0.5, "min_frames": 8}, [0, 6, 8]),
    ],
)
def test_each_criterion_leaves_out_what_it_says(store: Store, criteria: dict[str, Any], expected: list[int]) -> None:
    assert left_out(store, **{**EVERY_PATTERN, **criteria}) == expected


def test_rasters_of_a_few_lines_take_part_only_where_a_recipe_asks_for_them(tmp_path: Path) -> None:
    preprocessing = Preprocessing(image_size=(16, 64, 64))
    for name, frames, pitch in (("volume", 24, 0.25), ("lines", 5, 0.03), ("apart", 9, 0.9)):
        ds = make_dataset(retina(frames, rows=160, columns=96), pitch)
        measures = ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        measures.PixelSpacing, ds.PatientID = [0.0078, 0.06], f"P-{frames}"
        save(ds, tmp_path / "set" / f"{name}.dcm")
    build_store([tmp_path / "set"], tmp_path / "store", preprocessing, max_lost=1)
    made = Store.open(tmp_path / "store")
    notes = {entry.person_id: entry.notes for entry in made.entries()}
    assert len(notes) == 3
    assert "sparse_slices=2" in notes["P-5"]
    assert "sparse_slices=" in notes["P-9"]
    assert "sparse_slices" not in notes["P-24"]
    made.set_split({person: "train" for person in notes})
    assert len(select(made, DataRecipe(), "train").volume_ids) == 1
    assert any("sparse_slices" in line for line in select(made, DataRecipe(), "train").flow.lines())
    assert len(select(made, DataRecipe(exclude_notes=()), "train").volume_ids) == 3


LEFT_OUT = (
    "sparse_slices=2",
    "vertical_lines",
    "neighbours_unlike",
    "part_of_scan",
    "radial_by_content",
    "retina_doubtful",
)


def test_failed_scans_are_left_out_by_default_and_counted(tmp_path: Path) -> None:
    rows = [index_entry(2 * number, split="train", notes=note) for number, note in enumerate(LEFT_OUT)]
    rows += [index_entry(60, split="train", quality=0.0), index_entry(62, split="train", quality=0.09)]
    rows += [index_entry(64, split="train", quality=0.1), index_entry(66, split="train", notes="burned_in_text")]
    made = store_of(tmp_path / "store", rows)
    chosen = select(made, DataRecipe(), "train")
    assert len(chosen.volume_ids) == 2
    lost = {stage.name: stage.lost.volumes for stage in chosen.flow.stages}
    assert lost["min_quality"] == 2
    assert lost["exclude_notes"] == len(LEFT_OUT)
    everything = select(made, DataRecipe(min_quality=None, exclude_notes=()), "train")
    assert len(everything.volume_ids) == len(rows)
    sound = store_of(tmp_path / "sound", [index_entry(0, split="train")])
    names = [stage.name for stage in select(sound, DataRecipe(), "train").flow.stages]
    assert "min_quality" not in names  # a default that leaves nothing out is not listed


def test_the_flow_counts_every_stage_by_device_and_site(store: Store) -> None:
    chosen = select(store, DataRecipe(min_quality=0.5, max_samples=4), "train")
    stages = {stage.name: stage for stage in chosen.flow.stages}
    assert list(stages) == ["store", "split", "patterns", "min_quality", "max_samples"]
    assert [stage.left.volumes for stage in stages.values()] == [11, 10, 9, 8, 4]
    assert [stage.lost.volumes for stage in stages.values()] == [0, 1, 1, 1, 4]
    assert stages["split"].lost.people == 1
    assert stages["store"].by_device["zeiss_cirrus"].volumes == 1
    assert {name: counts.people for name, counts in stages["patterns"].by_site.items()} == {"UAB": 1, "unknown": 8}
    assert stages["patterns"].left.eyes == 9
    lines = chosen.flow.lines()
    assert len(lines) == 6
    assert "quality 0.5 at least" in lines[4]
    assert lines[4].split("  ")[-1].strip() == "UAB 1, unknown 7"
    assert not any(entry.person_id in str(chosen.flow) for entry in store.entries())


def test_a_file_of_two_volumes_is_one_file() -> None:
    counts = count_entries(
        pd.DataFrame([index_entry(0, file_key="one"), index_entry(1, file_key="one"), index_entry(2)])
    )
    assert (counts.people, counts.eyes, counts.volumes, counts.files) == (2, 3, 3, 2)


def test_sites_come_from_participants_where_files_name_none(tmp_path: Path) -> None:
    rows = [index_entry(0), index_entry(2, site="B"), index_entry(4)]
    result = [{"person_id": "1001", "clinical_site": "A"}, {"person_id": "1002", "clinical_site": "A"}]
    store = store_of(tmp_path / "store", rows, result)
    assert set(select(store, DataRecipe(), "").flow.stages[0].by_site) == {"A", "B", "unknown"}
    assert select(store, DataRecipe(sites=("A",)), "").volume_ids == [index_entry(0)["volume_id"]]


def test_one_per_eye_keeps_the_best_and_breaks_ties_by_id(tmp_path: Path) -> None:
    same = {"person_id": "1", "eye": "OD"}
    rows = [
        index_entry(0, **same, quality=0.5, visit="a"),
        index_entry(1, **same, quality=0.9, visit="a"),
        index_entry(2, **same, quality=0.7, visit="b"),
        index_entry(3, **same, quality=0.7, visit="b"),
        index_entry(4, **{**same, "eye": "OS"}, quality=0.1, device="zeiss_cirrus"),
    ]
    store = store_of(tmp_path / "store", rows)
    ids = [row["volume_id"] for row in rows]
    assert select(store, DataRecipe(one_per="eye"), "").volume_ids == sorted([ids[1], ids[4]])
    by_visit = select(store, DataRecipe(one_per="eye_and_visit"), "").volume_ids
    assert by_visit == sorted([ids[1], min(ids[2], ids[3]), ids[4]])
    assert select(store, DataRecipe(one_per="eye_and_device"), "").volume_ids == sorted([ids[1], ids[4]])


def test_a_draw_depends_on_the_seed_and_not_on_the_order_of_files(tmp_path: Path) -> None:
    rows = [index_entry(number) for number in range(30)]
    one, other = store_of(tmp_path / "one", rows), store_of(tmp_path / "other", reversed(rows))
    few = DataRecipe(max_samples=5)
    assert select(one, few, "", 1).volume_ids == select(other, few, "", 1).volume_ids
    assert select(one, few, "", 1).volume_ids != select(one, few, "", 2).volume_ids


def test_an_empty_choice_shows_the_flow_and_who_took_the_last(store: Store) -> None:
    data = DataRecipe(regions=("Makula",), min_quality=0.5)
    chosen = select(store, data, "train")
    with pytest.raises(UsageError) as caught:
        check_not_empty(chosen, store, "train")
    result = str(caught.value)
    assert "region Makula (the store has no Makula) took out the last 9" in result
    assert "in the store" in result
    assert "split train" in result
    check_not_empty(select(store, DataRecipe(), "train"), store, "train")


@pytest.mark.parametrize(
    ("balance", "names"),
    [
        ("none", {"all"}),
        ("device", {"topcon_triton", "zeiss_cirrus"}),
        ("site", {"UAB", "unknown"}),
        ("device_and_site", {"topcon_triton at UAB", "topcon_triton at unknown", "zeiss_cirrus at unknown"}),
    ],
)
def test_domains_are_named_by_what_is_balanced(store: Store, balance: Any, names: set[str]) -> None:
    assert set(select(store, DataRecipe(balance=balance), "train").domains.values()) == names


def test_filters_and_balance_take_any_device_and_a_wrong_name_lists_those_of_the_store(tmp_path: Path) -> None:
    rows = [index_entry(n, device=("optovue_avanti", "nidek_mirante", "acme_x_1")[n % 3]) for n in range(9)]
    store = store_of(tmp_path / "store", rows)
    data = DataRecipe(devices=("optovue_avanti", "acme_x_1"), balance="device")
    chosen = select(store, data, "")
    assert len(chosen.volume_ids) == 6
    assert set(chosen.domains.values()) == {"optovue_avanti", "acme_x_1"}
    wrong = (
        r"^the store has no device optovue_avanty; it holds acme_x_1 \(3\), nidek_mirante \(3\), optovue_avanti \(3\)$"
    )
    with pytest.raises(UsageError, match=wrong):
        select(store, DataRecipe(devices=("optovue_avanty", "acme_x_1")), "")
    with pytest.raises(ValidationError, match="is not a device"):
        DataRecipe(devices=("Optovue Avanti",))
