"""The guide to OCTID, RETOUCH, GOALS, MIRAGE's sets, OLIVES and NEH: its commands run on folders of the same layout."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from command_line import call
from eye_files import write_voxels
from octjepa.datasets.catalogue import catalogue
from octjepa.phantom import make_eye
from octjepa.store import Store
from planted import write_encoder
from shaped_eye import shaped_eye
from synthetic import small_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "other_data_sets.md"
RECIPE = small_recipe(
    preprocessing={"image_size": [8, 96, 64], "margin": [0, 8, 4], "target_spacing_mm": [0.7, 0.012, 0.09]},
    tokens={"patch_size": [4, 16, 16], "select": "tissue", "budget": 40},
)


def sections() -> dict[str, str]:
    """The text of each section of the page by its heading."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands(heading: str) -> list[str]:
    return re.findall(r"^    (\S.*)$", sections()[heading], re.MULTILINE)


@pytest.fixture
def run_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the commands of a section in a folder, with a small encoder and its preprocessing."""
    encoder = write_encoder(tmp_path / "run.safetensors", RECIPE)
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump(json.loads(RECIPE.model_dump_json())))
    monkeypatch.chdir(tmp_path)

    def run(heading: str, *last: str) -> None:
        for command in commands(heading):
            if not command.startswith("octjepa "):
                subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
                continue
            words = [str(encoder) if word == "RUN" else word for word in shlex.split(command)[1:]]
            words += ["--recipe", str(recipe), "--workers", "1", "--quiet"] if words[0] == "ingest" else []
            words += last if command == commands(heading)[-1] else ()
            done = call(*words)
            assert done.code == 0, f"{command}\n{done.out}{done.err}"

    return run


@pytest.fixture(scope="session")
def bscans() -> Iterator[np.ndarray]:
    """Different B-scans [H, W] of simulated eyes, as many as are asked for."""

    def all_of() -> Iterator[np.ndarray]:
        for seed in range(100):
            yield from shaped_eye("topcon_maestro2", seed=seed).volume.pixels[4:-4:2]

    return all_of()


def save(path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def results(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_each_set_has_a_section_that_ends_in_its_number_within_forty_lines() -> None:
    named = [entry for entry in catalogue() if entry.guide.startswith("other_data_sets.md#")]
    assert len(named) == len(sections()) == 6
    for heading, text in sections().items():
        assert text.count("\n") <= 40, heading
        assert commands(heading)[-1].startswith(("octjepa probe ", "octjepa segment segment_linear "))
        for word in ("Layout", "Spacing", "Split", "Terms", "Known defects", "Published number"):
            assert f"**{word}" in text, (heading, word)
    checked = {command.split()[3] for heading in sections() for command in commands(heading) if " check " in command}
    assert checked == {entry.name for entry in named}


def test_octid(tmp_path: Path, run_commands, bscans) -> None:
    for name in ("NORMAL", "CSR", "MH"):
        for number in range(1, 11):
            save(tmp_path / "OCTID" / name / f"{name}{number}.jpeg", next(bscans))
    run_commands("OCTID")
    table = Store.open("octid").table
    assert table["person_id"].nunique() == 30
    metrics = {row["metric"] for row in results(tmp_path / "octid.json")["rows"]}
    assert {"auroc_ovr", "balanced_accuracy"} <= metrics, metrics
    assert {row["label"] for row in read_table("OCTID/labels.tsv")} == {"normal", "csr", "mh"}


def read_table(path: str) -> list[dict[str, str]]:
    head, *lines = Path(path).read_text().splitlines()
    return [dict(zip(head.split("\t"), line.split("\t"), strict=True)) for line in lines]


def test_retouch(tmp_path: Path, run_commands) -> None:
    for number in range(1, 15):
        device, kind = ("Cirrus", "Topcon")[number % 2], ("Training", "Test")[number > 12]
        folder = tmp_path / "RETOUCH" / f"RETOUCH-{kind}Set-{device}" / f"{kind[:5].upper()}{number:03d}"
        folder.mkdir(parents=True)
        eye = make_eye(number, 0, "OD", "heidelberg_spectralis")
        scan = eye.pixels
        write_voxels(folder / "oct.mhd", scan, eye.spacing_mm)
        if kind == "Training":
            labels = np.zeros_like(scan)
            row = int(np.argmax(scan.mean(axis=(0, 2))))  # of the retina
            labels[8:16, row - 20 : row, 10:70], labels[8:16, row - 20 : row, 80:140] = 1, 2
            labels[4:20, row : row + 12, 20:140] = 3
            write_voxels(folder / "reference.mhd", labels, eye.spacing_mm)
    run_commands("RETOUCH")
    table = Store.open("retouch").table
    assert len(table) == 12  # the labelled scans, and none of the label volumes
    assert "retouch-train001" in set(table["person_id"])
    found = results(tmp_path / "retouch_fluid" / "results.json")
    dice = {row["class"] for row in found["rows"] if row["metric"] == "dice"}
    assert dice == {"irf", "srf", "ped", "mean"}


@pytest.mark.parametrize(("heading", "folder"), [("GOALS", "GOALS"), ("MIRAGE's sets", "AROI")])
def test_single_bscans_with_masks(heading: str, folder: str, tmp_path: Path, run_commands, bscans) -> None:
    number = 0
    for split, count in (("train", 12), ("val", 4), ("test", 6)):
        for _ in range(count):
            number += 1
            pixels = next(bscans)
            mask = np.zeros_like(pixels)
            bright = int(np.argmax(pixels.mean(axis=1)))
            mask[bright - 30 : bright - 5], mask[bright - 5 : bright + 20] = 80, 160
            if heading == "GOALS":
                mask[bright + 20 : bright + 60] = 255
            save(tmp_path / folder / split / "bscan" / f"{number:04d}.png", pixels)
            save(tmp_path / folder / split / "semseg" / f"{number:04d}.png", mask)
    (tmp_path / folder / "INFO.json").write_text("{}")
    run_commands(heading)
    table = Store.open(commands(heading)[-1].split(" --store ")[1].split()[0]).table
    assert table["split"].value_counts().to_dict() == {"train": 12, "test": 6, "val": 4}
    found = results(tmp_path / commands(heading)[-1].split()[-1] / "results.json")
    dice = {row["class"]: row["value"] for row in found["rows"] if row["metric"] == "dice" and row["name"] == "small"}
    assert set(dice) - {"mean"} == ({"rnfl", "gcipl", "choroid"} if heading == "GOALS" else {"first", "second"})
    assert dice["mean"] > 0.15


def test_olives(tmp_path: Path, run_commands) -> None:
    for number in range(24):
        eye = ("OD", "OS")[number % 2]
        person = f"02{number // 2:02d}G"
        top = f"TREX DME/GILA/{person}{eye}/V1" if number < 12 else f"Prime_FULL/01-0{number // 2:02d}/W0"
        for index, pixels in enumerate(make_eye(number // 2, number % 2, eye, "heidelberg_spectralis").pixels):
            save(tmp_path / "OLIVES" / top / eye / f"TREXJ_{index:06d}.tif", pixels)
        (tmp_path / "OLIVES" / top / eye / "fundus.npy").write_bytes(b"")
    run_commands("OLIVES")
    table = Store.open("olives").table
    assert len(table) == 24
    assert table["person_id"].nunique() == 12  # both eyes of a person are one
    assert set(table["eye"]) == {"OD", "OS"}
    labels = {row["person_id"]: row["label"] for row in read_table("OLIVES/labels.tsv")}
    assert sorted(labels.values()) == ["prime"] * 6 + ["trex"] * 6
    assert results(tmp_path / "olives.json")["rows"]


def test_neh(tmp_path: Path, run_commands, bscans) -> None:
    for part in ("NORMAL", "DRUSEN", "CNV"):
        for person in range(1, 11):
            for index, eye in enumerate(("OD/", "OS/") if person % 2 else ("",)):
                label = "normal" if index else part.lower()
                save(tmp_path / "NEH" / part / str(person) / f"{eye}003_{label}.jpg", next(bscans))
    run_commands("NEH")
    table = Store.open("neh").table
    assert table["person_id"].nunique() == 30  # 1 of CNV is another person than 1 of NORMAL
    assert len(table) == 45
    labels = {(row["person_id"], row.get("eye", "")): row["label"] for row in read_table("NEH/labels.tsv")}
    assert labels["neh-cnv-1", "OD"] == "cnv"
    assert labels["neh-cnv-1", "OS"] == "normal"
    metrics = {row["metric"] for row in results(tmp_path / "neh.json")["rows"]}
    assert {"auroc_ovr", "balanced_accuracy"} <= metrics, metrics
