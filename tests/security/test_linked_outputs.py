"""Links where the results of fine-tuning, embedding, prediction and adaptation go.

A link inside an output folder may have come with a folder from somebody else. Where a whole folder would be written
through it, the command ends before it trains. A link at the path of a single file is replaced, and its target stays.
The folder that the user names may be a link.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octjepa.embed.embedding import embed_store
from octjepa.errors import UsageError
from octjepa.layers import BOUNDARIES
from octjepa.phantom import make_eye
from octjepa.phantom.dicom import write_eye
from octjepa.read.reader import read_volume
from octjepa.tasks.finetune import fit, inference
from octjepa.tasks.finetune.fit import FinetuneInputs, finetune_store
from octjepa.tasks.finetune.recipe import load_recipe
from octjepa.tasks.segmenter import adapt_scans
from octjepa.tasks.segmenter.adapt_scans import AdaptRequest, adapt_sources, save_segmenter
from octjepa.tasks.segmenter.inference import load_segmenter
from planted import QUICK, PlantedStore, write_encoder, write_labels

PRECIOUS = b"precious"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with a file of the user."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.txt").write_bytes(PRECIOUS)
    return tmp_path / "mine"


def assert_untouched(mine: Path) -> None:
    assert [path.name for path in mine.iterdir()] == ["own.txt"]
    assert (mine / "own.txt").read_bytes() == PRECIOUS


# -- fine-tuning --


class Stopped(Exception):
    """The training would begin now."""


def stop(*_: object) -> None:
    raise Stopped


@pytest.fixture(scope="module")
def planted() -> PlantedStore:
    return PlantedStore()


@pytest.fixture
def inputs(planted: PlantedStore, tmp_path: Path) -> FinetuneInputs:
    write_encoder(tmp_path / "encoder.safetensors")
    write_labels(tmp_path / "labels.tsv")
    return FinetuneInputs(
        tmp_path / "encoder.safetensors", planted, tmp_path / "labels.tsv", ("mark",), tmp_path / "ledger"
    )


@pytest.mark.parametrize("name", ["tuned", "checkpoints", "scratch", "scratch/tuned", "scratch/checkpoints"])
def test_a_fine_tuning_with_a_linked_checkpoint_folder_is_refused_before_it_trains(
    tmp_path: Path, mine: Path, inputs: FinetuneInputs, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    recipe, out = load_recipe("finetune", (*QUICK, "scratch=true")), tmp_path / "out"
    monkeypatch.setattr(fit, "tune", stop)
    with pytest.raises(Stopped):
        finetune_store(recipe, inputs, out)
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).symlink_to(mine)
    with pytest.raises(UsageError, match=r"is a link to .*mine, and no checkpoint is written through it: replace it"):
        finetune_store(recipe, inputs, out, resume=True)
    assert_untouched(mine)
    (out / name).unlink()
    with pytest.raises(Stopped):  # without the link it goes on
        finetune_store(recipe, inputs, out, resume=True)


def test_a_new_fine_tuning_does_not_begin_in_a_folder_that_holds_a_link(
    tmp_path: Path, mine: Path, inputs: FinetuneInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "tune", stop)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tuned").symlink_to(mine)
    with pytest.raises(UsageError, match="is not empty"):
        finetune_store(load_recipe("finetune", QUICK), inputs, tmp_path / "out")
    assert_untouched(mine)


@pytest.mark.parametrize("target", ["disk", "nowhere"])
def test_a_fine_tuning_into_a_link_of_the_user_works_if_its_target_is_a_folder(
    tmp_path: Path, inputs: FinetuneInputs, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(fit, "tune", stop)
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / target)
    with pytest.raises(UsageError if target == "nowhere" else Stopped):
        finetune_store(load_recipe("finetune", QUICK), inputs, tmp_path / "out")
    assert (tmp_path / "disk" / "run.json").is_file() == (target == "disk")


# -- embedding --


@pytest.mark.slow
def test_a_table_replaces_a_link_and_leaves_its_target(planted: PlantedStore, tmp_path: Path, mine: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder.safetensors")
    (tmp_path / "eyes.parquet").symlink_to(mine / "own.txt")
    embed_store(encoder, planted, tmp_path / "eyes.parquet")
    assert not (tmp_path / "eyes.parquet").is_symlink()
    assert_untouched(mine)


@pytest.mark.slow
def test_tokens_go_into_a_linked_folder_and_a_link_to_nowhere_is_refused_before_the_work(
    planted: PlantedStore, tmp_path: Path
) -> None:
    encoder = write_encoder(tmp_path / "encoder.safetensors")
    (tmp_path / "disk").mkdir()
    (tmp_path / "tokens").symlink_to(tmp_path / "disk")
    embed_store(encoder, planted, tmp_path / "eyes.parquet", tokens=tmp_path / "tokens")
    assert (tmp_path / "disk" / "tokens.json").is_file()
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="lost cannot be made: give --tokens a new folder"):
        embed_store(encoder, planted, tmp_path / "more.parquet", tokens=tmp_path / "lost")
    assert not (tmp_path / "more.parquet").exists()


# -- prediction --


def test_predictions_do_not_read_scans_into_a_linked_store(
    tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "load_tuned", lambda path: pytest.fail("it began"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "store").symlink_to(mine)
    with pytest.raises(UsageError, match="store is a link"):
        inference.predict_scans(tmp_path / "tuned", [tmp_path], tmp_path / "out")
    assert_untouched(mine)


def test_a_table_of_predictions_replaces_a_link(tmp_path: Path, mine: Path) -> None:
    import pandas as pd

    (tmp_path / "predictions.tsv").symlink_to(mine / "own.txt")
    inference.write_frame(tmp_path / "predictions.tsv", pd.DataFrame({"value": [1]}))
    assert (tmp_path / "predictions.tsv").read_text() == "value\n1\n"
    assert_untouched(mine)


# -- adaptation of the segmentation network --


def test_an_adapted_network_replaces_links_and_leaves_their_targets(tmp_path: Path, mine: Path) -> None:
    out = tmp_path / "network"
    out.mkdir()
    for name in (adapt_scans.WEIGHTS, adapt_scans.RECORD):
        (out / name).symlink_to(mine / "own.txt")
    packaged = load_segmenter()
    save_segmenter(packaged, out, {})
    assert not any(path.is_symlink() for path in out.iterdir())
    assert load_segmenter(out).calibration == packaged.calibration
    assert_untouched(mine)


def test_an_adaptation_into_a_link_to_nowhere_is_refused_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapt_scans, "adapt", stop)
    scan, labels = tmp_path / "eye.dcm", tmp_path / "labels"
    eye = make_eye(11, 41, "OD", "heidelberg_spectralis")
    write_eye(scan, eye, 11)
    labels.mkdir()
    slices, _, columns = read_volume(scan).shape
    rows = np.full((8, slices, columns), np.nan, np.float32)
    rows[:, 2] = np.arange(8)[:, None] * 5 + 60
    np.savez(labels / "eye_boundaries.npz", rows=rows, names=np.array(BOUNDARIES))
    request = AdaptRequest([str(scan)], [labels])
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="cannot be made"):
        adapt_sources(request, tmp_path / "out")
    (tmp_path / "nowhere").mkdir()
    with pytest.raises(Stopped):
        adapt_sources(request, tmp_path / "out")
