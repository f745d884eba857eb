"""Folders of encoders from strangers: nothing is fetched, no native code is loaded, nothing huge is built."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octjepa.checkpoint.tensor_file import check_weights, read_safetensors
from octjepa.encoders import load_encoder
from octjepa.encoders.external import load_external
from octjepa.encoders.external.architecture import offline
from octjepa.encoders.external.state_dict import read_state_dict
from octjepa.errors import CheckpointError, OctjepaError, RecipeError, UsageError
from octjepa.model import VJEPA3D
from synthetic import small_recipe


@pytest.fixture(autouse=True)
def contacts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Every address that anything tried to reach or to look up; none may be."""
    contacts: list[object] = []

    def refuse(*words: Any) -> None:
        contacts.append(words[1:] or words)
        raise ConnectionRefusedError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield contacts
    assert contacts == []


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=16
    )
    ViTModel(config).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def change(folder: Path, **keys: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder


@pytest.mark.parametrize(
    "keys",
    [
        {"backbone": "microsoft/resnet-50", "use_pretrained_backbone": True},
        {"use_timm_backbone": True},
        {"backbone_config": {"model_type": "resnet"}},
        {"attn_implementation": "kernels-community/flash-attn"},
        {"_attn_implementation": "flash_attention_2"},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"auto_map": {"AutoModel": "their--repository.Model"}},
        {"model_type": "timm_wrapper", "architecture": "resnet50", "model_args": {"pretrained": True}},
        {"model_type": "timm_backbone", "backbone": "resnet50"},
        {"model_type": "detr"},
        {"model_type": ["vit"]},
        {"model_type": "x" * 10_000},
        {"use_kernels": True},
        {"base_model_name_or_path": "their/repository"},
    ],
    ids=str,
)
def test_keys_that_fetch_or_load_code_are_refused(vit: Path, keys: dict[str, object]) -> None:
    with pytest.raises(UsageError) as refused:
        load_external(change(vit, **keys))
    assert "config.json" in str(refused.value)
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_size": 10**9},
        {"num_hidden_layers": 10**6},
        {"hidden_size": 65_536, "intermediate_size": 65_536, "num_hidden_layers": 250},
        {"image_size": 10**7},
        {"image_size": [4096, 4096, 4096]},
        {"image_size": 0},
        {"image_size": 5000},
        {"patch_size": 1, "image_size": 4096, "hidden_size": 65_536},
        {"hidden_size": -4},
        {"hidden_size": "16"},
        {"hidden_act": "../act"},
        {"hidden_act": "nothing"},
        {"hidden_size": [1] * 1000},
        {"num_channels": 10**6},
        {"layer_norm_eps": 1e300},
        {"num_attention_heads": 0},
        {"patch_size": None},
        {"hidden_size": {"a": [[[[1]]]]}},
        {"num_attention_heads": 3},
    ],
    ids=str,
)
def test_networks_that_cannot_be_are_refused(vit: Path, keys: dict[str, object]) -> None:
    with pytest.raises(OctjepaError) as refused:
        load_external(change(vit, **keys))
    assert len(str(refused.value)) < 800


def test_what_lies_beside_the_weights_is_not_read(vit: Path) -> None:
    """An adapter would name a base model on the hub; an index would name files elsewhere."""
    (vit / "adapter_config.json").write_text('{"base_model_name_or_path": "their/model", "peft_type": "LORA"}')
    (vit / "generation_config.json").write_text('{"custom_generate": "their/code"}')
    load_external(change(vit, _name_or_path="their/model", id2label={"0": "x"}, torch_dtype="float16"))
    secret = vit.parent / "secret.safetensors"
    (vit / "model.safetensors").rename(secret)
    names = load_file(secret)
    index = {"weight_map": dict.fromkeys(names, "../secret.safetensors")}
    (vit / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OctjepaError, match=r"secret\.safetensors is damaged"):
        load_external(vit)
    secret.rename(vit / "secret.safetensors")
    load_external(vit)
    for damaged in ("[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{"):
        (vit / "model.safetensors.index.json").write_text(damaged)
        with pytest.raises(OctjepaError):
            load_external(vit)


@pytest.mark.parametrize(
    "about",
    [
        {"network": "resnet18", "arguments": {"pretrained": True}},
        {"network": "resnet18", "arguments": {"pretrained": "https://their.host/x.pth", "progress": False}},
        {
            "network": "DenseNet121",
            "arguments": {"spatial_dims": 3, "in_channels": 1, "out_channels": 1, "pretrained": True},
        },
        {"network": "SwinUNETR", "arguments": {"use_flash_attention": True}},
        {"network": "resnet10", "arguments": {"block": "basic"}},
        {"network": "resnet10", "arguments": {"n_input_channels": 10**9}},
        {"network": "resnet10", "arguments": {"widen_factor": 1000}},
        {"network": "SegResNet", "arguments": {"blocks_down": [10**6]}},
        {"network": "SegResNet", "arguments": {"init_filters": 65_536}},
        {"network": "resnet10", "arguments": {"spatial_dims": 3, "n_input_channels": 1}, "input_size": [10**6] * 3},
        {"network": "resnet10", "arguments": {"spatial_dims": 3, "n_input_channels": 1}, "input_size": "large"},
        {"network": "resnet10", "arguments": {"act": "../x"}},
        {"network": "resnet10", "arguments": {"act": "nothing"}},
        {"network": ["resnet10"]},
        {"network": "__class__"},
        {"arguments": {}},
        {"network": "resnet10", "arguments": []},
    ],
    ids=str,
)
def test_monai_networks_are_built_of_allowed_arguments(tmp_path: Path, about: dict[str, object]) -> None:
    pytest.importorskip("monai")
    (tmp_path / "monai.json").write_text(json.dumps(about))
    with pytest.raises(UsageError) as refused:
        load_external(tmp_path)
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize(
    "settings",
    [{"image_mean": "x"}, {"image_std": [0, 0, 0]}, {"image_mean": [1e308]}, {"image_std": []}, {"image_mean": [None]}],
)
def test_preprocessing_of_wrong_values_is_refused(vit: Path, settings: dict[str, object]) -> None:
    (vit / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match=r"preprocessor_config\.json: image_"):
        load_external(vit)


def test_the_hub_is_offline_within_and_as_before_after() -> None:
    import huggingface_hub.constants as constants

    before = constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE")
    with offline():
        assert constants.HF_HUB_OFFLINE
        assert os.environ["TRANSFORMERS_OFFLINE"] == "1"
        from huggingface_hub import hf_hub_download

        with pytest.raises(Exception, match="cache"):
            hf_hub_download("their/repository", "config.json")
    assert before == (constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE"))


@pytest.mark.parametrize("variables", [{"HF_HUB_OFFLINE": "TRUE"}, {"TRANSFORMERS_OFFLINE": "1"}])
def test_a_hub_that_was_offline_stays_offline(variables: dict[str, str]) -> None:
    """Also where this is the first use of the hub's client, which reads the variables when it is imported."""
    code = (
        "from octjepa.encoders.external.architecture import offline\n"
        "with offline():\n    from huggingface_hub import constants\n    assert constants.HF_HUB_OFFLINE\n"
        "print(constants.HF_HUB_OFFLINE)"
    )
    others = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    done = subprocess.run([sys.executable, "-c", code], env=others | variables, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"width": 2**16, "heads": 2}, "do not fit the encoder of their recipe: .* expected"),
        ({"depth": 256}, "2 blocks, the recipe has 256"),
        ({"predictor_width": 2**16, "predictor_heads": 2}, "more than half of this machine's"),
    ],
)
def test_a_small_file_of_ours_builds_no_huge_network(tmp_path: Path, changed: dict[str, int], words: str) -> None:
    recipe = small_recipe()
    weights = VJEPA3D.from_recipe(recipe).target_encoder.state_dict()
    described = recipe.model_dump(mode="json")
    described["model"] |= changed
    about = {"octjepa": json.dumps({"schema": 1, "recipe": described, "trained_on": []})}
    save_file({f"target_encoder.{name}": value for name, value in weights.items()}, tmp_path / "w.safetensors", about)
    with pytest.raises(CheckpointError, match=words):
        load_encoder(tmp_path / "w.safetensors")


@pytest.mark.parametrize("key", ["depth", "width", "predictor_depth", "predictor_width"])
def test_a_small_file_of_ours_builds_no_network_beyond_the_limits_of_a_recipe(tmp_path: Path, key: str) -> None:
    described = small_recipe().model_dump(mode="json")
    described["model"][key] = 10**9
    about = {"octjepa": json.dumps({"schema": 1, "recipe": described, "trained_on": []})}
    save_file({"target_encoder.norm.weight": torch.zeros(2)}, tmp_path / "w.safetensors", about)
    with pytest.raises(RecipeError, match=rf"model\.{key}.* less than or equal to"):
        load_encoder(tmp_path / "w.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(vit: Path, tmp_path: Path, value: float) -> None:
    weights = load_file(vit / "model.safetensors")
    weights["encoder.layer.0.output.dense.bias" if "encoder.layer.0.output.dense.bias" in weights else min(weights)][
        0
    ] = value
    save_file(weights, vit / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        load_external(vit)
    torch.save({"model": {"a.b": torch.tensor([value])}}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        read_state_dict(tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        check_weights({"a": torch.tensor([1.0, value], dtype=torch.bfloat16)}, "x")


def test_a_tensor_that_repeats_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"a.b": torch.zeros(1, dtype=torch.float16).expand(10**12)}}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match="more values than it stores"):
        read_state_dict(tmp_path / "x.pth")


@pytest.mark.slow
def test_compressed_checkpoints_are_refused(tmp_path: Path) -> None:
    torch.save({"a.b": torch.zeros(10_000_000)}, tmp_path / "plain.pth")
    with (
        zipfile.ZipFile(tmp_path / "plain.pth") as plain,
        zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert (tmp_path / "packed.pth").stat().st_size < 100_000
    with pytest.raises(CheckpointError, match="compressed data"):
        read_state_dict(tmp_path / "packed.pth")
    for content in (b"", b"PK\x03\x04", pickle.dumps([[]] * 3, protocol=2), b"\x80\x02" + b"(" * 100_000):
        (tmp_path / "x.pth").write_bytes(content)
        with pytest.raises(CheckpointError):
            read_state_dict(tmp_path / "x.pth")


@pytest.mark.parametrize(
    "content",
    [
        (20 << 20).to_bytes(8, "little") + b'{"a":' + b" " * (20 << 20),
        (2**63).to_bytes(8, "little") + b"{}",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        b"",
        b"\x02\0\0\0\0\0\0\0{}" + b"x" * 10,
        b"\x10\0\0\0\0\0\0\0" + b'{"a": "\xff\xff\xff"}',
    ],
)
def test_damaged_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_safetensors(tmp_path / "model.safetensors")
