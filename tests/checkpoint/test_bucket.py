"""Checkpoints in an emulated bucket: a run writes, prunes and resumes there, and weights are loaded from there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bucket_servers import Bucket
from faulty_proxy import Fault
from octjepa.checkpoint import folder
from octjepa.encoders import load_encoder
from octjepa.errors import CheckpointError, UsageError, WrongCheckpointError
from octjepa.outside import allow_outside
from octjepa.remote import join, list_objects, put_bytes, read_bytes, remove
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe

# gcsfs hands aiohttp the bytes of an upload in one piece, and aiohttp warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


def recipe_for(location: str, updates: int = 6):
    train = {"max_updates": updates, "global_batch": 4, "base_lr": 1e-3, "precision": "fp32"}
    checkpoint = {"dir": location, "every_updates": 2, "keep_last": 2}
    return small_recipe(
        train=train, checkpoint=checkpoint, monitor={"every_updates": None}
    )  # else the best stays as well


def names(location: str) -> list[str]:
    return [one.url.partition(location + "/")[2] for one in list_objects(location)]


@pytest.mark.slow
def test_a_run_saves_prunes_and_resumes_in_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    location = join(bucket.url, "run 1/saves")
    recipe, upload = recipe_for(location), "PUT" if bucket.scheme == "s3" else "POST"
    store = MemoryStore(recipe.preprocessing)
    bucket.proxy.faults += [Fault("503", upload, "model"), Fault("reset", upload, times=2)]
    whole = pretrain(recipe, store, tmp_path / "whole")
    assert names(location) == [
        f"step-0000000{n}/{file}"
        for n in (4, 6)
        for file in ("manifest.json", "model.safetensors", "optimiser.safetensors")
    ]
    assert whole.checkpoint == f"{location}/step-00000006"
    straight = {
        name: folder.read_tensors(join(location, "step-00000006"), name)
        for name in ("model.safetensors", "optimiser.safetensors")
    }

    # the last two updates are lost, and a torn upload lies there; the run continues and comes to the same weights
    remove(join(location, "step-00000006/manifest.json"))
    (tmp_path / "whole" / "summary.json").unlink()
    bucket.proxy.faults += [Fault("truncate", "GET", "model.safetensors")]
    pretrain(recipe, store, tmp_path / "whole", resume=True)
    for name, tensors in straight.items():
        again = folder.read_tensors(join(location, "step-00000006"), name)
        assert all(torch.equal(tensors[key], again[key]) for key in tensors)
    assert not (list((bucket.cache).glob(".new-*")))

    for source in (
        tmp_path / "whole",
        location,
        join(location, "step-00000006"),
        join(location, "step-00000006/model.safetensors"),
    ):
        with allow_outside(location):
            encoder = load_encoder(source)
        assert all(
            torch.equal(value, straight["model.safetensors"][f"target_encoder.{key}"])
            for key, value in encoder.encoder.state_dict().items()
        )


@pytest.mark.slow
def test_a_torn_upload_is_no_checkpoint_and_goes_with_the_next_pruning(bucket: Bucket) -> None:
    location = join(bucket.url, "saves")
    tensors = {"model.safetensors": {"w": torch.arange(4.0)}}
    for update in (1, 3):
        folder.write_folder(location, update, tensors, {})
    put_bytes(b"half", join(location, "step-00000002/model.safetensors"))
    put_bytes(b"coming", join(location, "step-00000004/model.safetensors"))
    put_bytes(b"mine", join(location, "notes.txt"))
    assert folder.list_checkpoints(location) == [join(location, "step-00000001"), join(location, "step-00000003")]
    folder.prune(location, 1)
    assert names(location) == [
        "notes.txt",
        "step-00000003/manifest.json",
        "step-00000003/model.safetensors",
        "step-00000004/model.safetensors",
    ]


@pytest.mark.slow
def test_damage_and_absence_are_reported(bucket: Bucket) -> None:
    location = join(bucket.url, "saves")
    folder.write_folder(location, 1, {"model.safetensors": {"w": torch.arange(4.0)}}, {})
    file = join(location, "step-00000001/model.safetensors")
    content = bytearray(read_bytes(file))
    content[-1] ^= 1
    put_bytes(bytes(content), file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged.*Remove step-00000001"):
        folder.read_tensors(join(location, "step-00000001"), "model.safetensors")
    remove(file)
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        folder.read_tensors(join(location, "step-00000001"), "model.safetensors")
    with pytest.raises(WrongCheckpointError, match="holds no checkpoint"):
        load_encoder(join(bucket.url, "nothing"))


def test_a_failed_upload_stops_the_run_and_keeps_what_was_there(bucket: Bucket, tmp_path: Path) -> None:
    location = join(bucket.url, "saves")
    tensors = {"model.safetensors": {"w": torch.arange(4.0)}}
    folder.write_folder(location, 1, tensors, {})
    upload = "PUT" if bucket.scheme == "s3" else "POST"
    bucket.proxy.faults.append(Fault("500", upload, times=99, after=1))  # the first file goes up, not the last
    with pytest.raises(CheckpointError, match=r"could not write checkpoint .*step-00000002.*--resume"):
        folder.write_folder(location, 2, tensors, {})
    bucket.proxy.faults.clear()
    assert folder.list_checkpoints(location) == [join(location, "step-00000001")]
    recipe = recipe_for(location.replace("://eyes", "://absent"))
    with pytest.raises(UsageError, match=r"checkpoint.dir .* cannot be used: .*no bucket"):
        pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run")
    assert not (tmp_path / "run").exists()
