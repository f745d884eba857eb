"""Encoders on the Hugging Face Hub, against a stand-in on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

import octjepa
from command_line import call
from hub_server import hub_server
from octjepa.encoders.export import export
from octjepa.encoders.hub import push_to_hub
from octjepa.errors import UsageError
from octjepa.model import VJEPA3D
from synthetic import small_recipe

pytest.importorskip("huggingface_hub")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Fresh weights of a small recipe, as an exported file holds them."""
    recipe = small_recipe()
    tensors = VJEPA3D.from_recipe(recipe).target_encoder.state_dict()
    about = {"schema": 1, "recipe": recipe.model_dump(mode="json"), "trained_on": []}
    path = tmp_path / "weights.safetensors"
    save_file(
        {f"target_encoder.{name}": value for name, value in tensors.items()}, path, {"octjepa": json.dumps(about)}
    )
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with hub_server() as hub:
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield hub


def same(one: octjepa.checkpoint.PretrainedEncoder, other: octjepa.checkpoint.PretrainedEncoder) -> bool:
    own, theirs = one.encoder.state_dict(), other.encoder.state_dict()
    return own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)


def test_a_round_trip_gives_the_same_encoder(weights, hub):
    address = push_to_hub(weights, "lab/encoder", licence="apache-2.0", metrics={"auroc": 0.5})
    assert address == f"{hub.url}/lab/encoder"
    assert set(hub.repositories["lab/encoder"]) == {"model.safetensors", "README.md", "SHA256SUMS"}
    assert hub.private == {"lab/encoder"}
    assert same(octjepa.from_pretrained("lab/encoder"), octjepa.load_encoder(weights))
    _, head, text = hub.repositories["lab/encoder"]["README.md"].decode().split("---\n", 2)
    about = yaml.safe_load(head)
    assert (about["license"], about["library_name"], about["metrics"]) == ("apache-2.0", "octjepa", ["auroc"])
    assert about["model-index"][0]["results"][0]["metrics"] == [{"type": "auroc", "value": 0.5}]
    assert "retina" in about["tags"]
    assert "Not a medical device" in text


def test_the_verb_pushes_what_it_exports(weights, hub, tmp_path):
    done = call(
        *("export", weights, "--format", "hf", "--out", tmp_path / "out", "--push", "lab/for-transformers"),
        *("--public", "--licence", "mit", "--json"),
    )
    assert done.code == 0, done.err
    assert done.json["repository"] == f"{hub.url}/lab/for-transformers"
    assert json.loads(hub.repositories["lab/for-transformers"]["config.json"])["model_type"] == "octjepa"
    assert not hub.private


def test_a_folder_is_loaded_without_a_network(weights, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    export(weights, "safetensors", tmp_path / "out")
    assert same(octjepa.from_pretrained(tmp_path / "out"), octjepa.load_encoder(weights))


def test_what_goes_wrong_is_one_line(weights, hub, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="has no repository lab/absent, or it is private"):
        octjepa.from_pretrained("lab/absent")
    with pytest.raises(UsageError, match="neither a folder nor a name on the Hugging Face Hub: expected owner/name"):
        octjepa.from_pretrained("no folder")
    for name in ("../run", "./run", "runs/.", "-lab/x", "lab/x..y"):
        with pytest.raises(UsageError, match="is neither a folder nor a name on the Hugging Face Hub"):
            octjepa.from_pretrained(name)
    with pytest.raises(UsageError, match="expected owner/name"):
        push_to_hub(weights, "name")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises(UsageError, match=r"lab/x is not in the local cache, and http://127\.0\.0\.1:9 is not reached"):
        octjepa.from_pretrained("lab/x")
