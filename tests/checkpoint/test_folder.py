import json
import shutil

import pytest
import torch

from octjepa.checkpoint import folder
from octjepa.errors import CheckpointError

WEIGHTS = {"model.safetensors": {"a": torch.arange(6.0).reshape(2, 3)}}


def test_what_is_written_is_read_back(tmp_path):
    written = folder.write_folder(tmp_path, 7, WEIGHTS, {"science_hash": "x"})
    assert written.name == "step-00000007"
    assert folder.read_manifest(written)["science_hash"] == "x"
    assert torch.equal(folder.read_tensors(written, "model.safetensors")["a"], WEIGHTS["model.safetensors"]["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_a_flipped_byte_is_found(tmp_path):
    written = folder.write_folder(tmp_path, 1, WEIGHTS, {})
    path = written / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        folder.read_tensors(written, "model.safetensors")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": {}}'])
def test_a_damaged_manifest_is_an_error_not_a_crash(tmp_path, text):
    written = folder.write_folder(tmp_path, 1, WEIGHTS, {})
    (written / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        folder.read_manifest(written)


def test_a_newer_schema_is_refused(tmp_path):
    written = folder.write_folder(tmp_path, 1, WEIGHTS, {})
    manifest = json.loads((written / "manifest.json").read_text())
    (written / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
    with pytest.raises(CheckpointError, match="schema 99"):
        folder.read_manifest(written)


def test_a_half_written_folder_is_not_a_checkpoint(tmp_path):
    (tmp_path / ".step-00000003.partial").mkdir()
    (tmp_path / "step-00000002").mkdir()
    assert folder.list_checkpoints(tmp_path) == []
    folder.write_folder(tmp_path, 3, WEIGHTS, {})
    assert [path.name for path in folder.list_checkpoints(tmp_path)] == ["step-00000003"]
    assert not (tmp_path / ".step-00000003.partial").exists()


def test_pruning_keeps_the_last(tmp_path):
    for update in (1, 2, 10):
        folder.write_folder(tmp_path, update, WEIGHTS, {})
    folder.prune(tmp_path, 2)
    assert [path.name for path in folder.list_checkpoints(tmp_path)] == ["step-00000002", "step-00000010"]


def test_pruning_keeps_the_newest_the_best_and_every_so_many(tmp_path):
    for update in range(1, 11):
        folder.write_folder(tmp_path, update, WEIGHTS, {"score": 1.0 if update == 3 else 0.5})
    folder.prune(tmp_path, keep_last=2, keep_every=4)
    assert [folder.update_number(one) for one in folder.list_checkpoints(tmp_path)] == [3, 4, 8, 9, 10]


def test_copies_that_the_user_made_are_neither_loaded_nor_removed(tmp_path):
    for update in (1, 2, 3):
        folder.write_folder(tmp_path, update, WEIGHTS, {})
    copies = ["step-00000001.bak", "step-00000003 copy"]
    for name in copies:
        shutil.copytree(tmp_path / name[:13], tmp_path / name)
    assert folder.load_newest(tmp_path, lambda path: path.name) == "step-00000003"
    folder.prune(tmp_path, keep_last=2, keep_every=1000)
    folder.remove_later(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.bak", "step-00000002", copies[1]]


def test_damaged_checkpoints_after_the_newest_do_not_push_it_out(tmp_path):
    for update in (3, 4, 6):
        folder.write_folder(tmp_path, update, WEIGHTS, {})
    folder.prune(tmp_path, keep_last=1, newest=4)  # 6 is damaged: the run continued from 3
    assert [folder.update_number(one) for one in folder.list_checkpoints(tmp_path)] == [4, 6]
