"""Published checkpoints by name: narrow random weights in the published layout become the network they describe."""

from __future__ import annotations

import argparse
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octjepa.encoders.external import check_address, is_external, load_external
from octjepa.encoders.external.published import PUBLISHED, Published, from_architecture
from octjepa.encoders.external.state_dict import file_sha256, read_state_dict
from octjepa.encoders.external.vit import VisionTransformer, ViTShape
from octjepa.errors import CheckpointError, UsageError
from octjepa.train.learner import parameters_by_level

VIEW = np.random.default_rng(0).integers(0, 255, size=(3, 32, 32), dtype=np.uint8)
IMAGES = {"mirage": (64, 64), "octcube": (6, 32, 32), "dinov2": (28, 28), "retfound_dinov2": (28, 28)}


def narrow(name: str) -> Published:
    """The published encoder as a network of two blocks, 16 wide, on small pictures."""
    return replace(PUBLISHED[name], sizes={16: (2, 2)}, image=IMAGES.get(name, (32, 32)))


def saved(path: Path, weights: dict[str, Tensor]) -> Path:
    torch.save(weights, path)
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_layout_gives_the_tokens_of_its_grid(layouts, tmp_path, name):
    if name == "dinov3":
        pytest.importorskip("transformers", minversion="4.56")
    path = saved(tmp_path / "weights.pth", layouts[name]())
    encoder = narrow(name).load(path)
    tokens = encoder.tokens(VIEW)
    grid = encoder.grid(VIEW.shape)
    assert grid == ((2, 2, 2) if name == "octcube" else (3, 2, 2))
    assert tokens.shape == (np.prod(grid), 16)
    assert encoder.about["sha256"] == file_sha256(path)
    assert encoder.about["licence"]
    assert encoder.about["source"].startswith("github.com/")
    untrained = encoder.untrained().tokens(VIEW)
    assert untrained.shape == tokens.shape
    assert not np.allclose(untrained, tokens)
    again = from_architecture(json.loads(json.dumps(encoder.architecture())), path)
    again.network.load_state_dict(encoder.network.state_dict())
    assert np.array_equal(again.tokens(VIEW), tokens)
    assert encoder.width(VIEW.shape) == 16


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_layout_is_trained_with_its_blocks_in_order(layouts, tmp_path, name):
    if name == "dinov3":
        pytest.importorskip("transformers", minversion="4.56")
    encoder = narrow(name).load(saved(tmp_path / "weights.pth", layouts[name]()))
    patches, first, last = parameters_by_level(encoder.network.requires_grad_(True))
    names = {parameter: key for key, parameter in encoder.network.named_parameters()}
    final = {names[parameter] for parameter in last if ".1." not in names[parameter]}
    assert len(final) == (0 if name == "mirage" else 2)  # the norm, which MIRAGE has not
    assert all(".0." in names[parameter] for parameter in first)
    tokens = encoder.features(torch.from_numpy(VIEW / np.float32(255)))
    assert np.allclose(tokens.detach(), encoder.tokens(VIEW), atol=1e-5)
    tokens.square().mean().backward()
    for parameter in (*first, *last):
        assert parameter.grad is not None, names[parameter]
    assert any(parameter.grad is not None for parameter in patches)


@pytest.mark.parametrize("name", ["retfound", "mirage", "dinov2"])
def test_tokens_of_a_slice_are_of_that_slice(layouts, tmp_path, name):
    encoder = narrow(name).load(saved(tmp_path / "weights.pth", layouts[name]()))
    changed = VIEW.copy()
    changed[1] = 255 - changed[1]
    same = np.isclose(encoder.tokens(VIEW), encoder.tokens(changed), atol=1e-6).all(axis=1)
    assert same.reshape(3, 4).tolist() == [[True] * 4, [False] * 4, [True] * 4]


def test_an_mae_computes_what_transformers_computes(layouts, tmp_path):
    from transformers import ViTConfig, ViTModel

    weights = layouts["retfound"]()
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=16,
        layer_norm_eps=1e-6,
    )
    theirs = fill_transformers(ViTModel(config, add_pooling_layer=False), weights)
    encoder = narrow("retfound").load(saved(tmp_path / "weights.pth", {"model": weights}))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(pixel_values=images).last_hidden_state[:, 1:]
        assert torch.allclose(encoder.network(images), expected, atol=1e-5)


@pytest.mark.parametrize("registers", [0, 2])
def test_dinov2_computes_what_transformers_computes(layouts, tmp_path, registers):
    from transformers import Dinov2Config, Dinov2Model, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    weights = layouts["dinov2"](registers=registers)
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 42,
        "patch_size": 14,
    }
    if registers:
        theirs = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(num_register_tokens=registers, **size))
    else:
        theirs = Dinov2Model(Dinov2Config(**size))
    fill_transformers(theirs, weights)
    # Positions were learned for 3 x 3 patches and are resized to 2 x 2.
    encoder = narrow("dinov2").load(saved(tmp_path / "weights.pth", weights))
    images = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(pixel_values=images).last_hidden_state[:, 1 + registers :]
        assert torch.allclose(encoder.network(images), expected, atol=1e-5)


# A part of a block in published names -> what transformers calls it, in all versions.
PARTS = {
    "norm1": ("layernorm_before", "norm1"),
    "norm2": ("layernorm_after", "norm2"),
    "attn.proj": ("attention.o_proj", "attention.output.dense"),
    "mlp.fc1": ("mlp.fc1", "intermediate.dense"),
    "mlp.fc2": ("mlp.fc2", "output.dense"),
    "ls1.gamma": ("layer_scale1.lambda1",),
    "ls2.gamma": ("layer_scale2.lambda1",),
    "q": ("q_proj", "attention.query"),
    "k": ("k_proj", "attention.key"),
    "v": ("v_proj", "attention.value"),
}
TOP = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "mask_token": "embeddings.mask_token",
    "register_tokens": "embeddings.register_tokens",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}


def fill_transformers(model: torch.nn.Module, weights: dict[str, Tensor]) -> torch.nn.Module:
    """Gives a ViT or DINOv2 of transformers the tensors of a checkpoint in published names; all of its own are set."""
    own, filled = model.state_dict(), {}

    def fill(number: str, part: str, kind: str, value: Tensor) -> None:
        inside = [name for name in own if f".{number}." in name and name.endswith(kind)]
        name = next(name for hint in PARTS[part] for name in inside if hint in name)
        filled[name] = value

    for name, value in weights.items():
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            part, _, kind = rest.rpartition(".")
            if part == "attn.qkv":
                for letter, third in zip("qkv", value.chunk(3), strict=True):
                    fill(number, letter, kind, third)
            else:
                fill(number, *((rest, "") if kind == "gamma" else (part, kind)), value)
        else:
            ours = next((ours for ours in TOP if name == ours or name.startswith(f"{ours}.")), None)
            if ours is not None and TOP[ours] + name.removeprefix(ours) in own:
                filled[TOP[ours] + name.removeprefix(ours)] = value
    assert filled.keys() == own.keys()
    model.load_state_dict(filled)
    return model.eval()


def test_dinov3_is_the_network_of_transformers(layouts, tmp_path):
    pytest.importorskip("transformers", minversion="4.56")
    weights = layouts["dinov3"]()
    encoder = narrow("dinov3").load(saved(tmp_path / "weights.pth", weights))
    tensors = {name: value for name, value in encoder.network.named_parameters()}
    thirds = weights["blocks.1.attn.qkv.bias"].chunk(3)
    for letter, third in (("q", thirds[0]), ("v", thirds[2])):
        found = next(value for name, value in tensors.items() if f"layer.1.attention.{letter}_proj.bias" in name)
        assert torch.equal(found, third)
    assert not any("k_proj.bias" in name for name in tensors)  # its mask is zero in every published file
    masked = weights | {f"blocks.{n}.attn.qkv.bias_mask": torch.zeros(48) for n in range(2)}
    other = narrow("dinov3").load(saved(tmp_path / "masked.pth", masked))
    assert not np.allclose(other.tokens(VIEW), encoder.tokens(VIEW))


def test_a_gated_dinov2_is_read(layouts, tmp_path):
    encoder = narrow("dinov2").load(saved(tmp_path / "weights.pth", layouts["dinov2"](gated=True)))
    assert encoder.network.shape.gated
    assert encoder.tokens(VIEW).shape == (12, 16)


def test_mirage_reads_b_scans_by_their_own_adapter(layouts, tmp_path):
    weights = layouts["mirage"]()
    encoder = narrow("mirage").load(
        saved(tmp_path / "weights.pth", {"model": weights, "args": argparse.Namespace(a=1)})
    )
    other = dict(weights)
    other["input_adapters.slo.proj.weight"] = torch.zeros(16, 1, 32, 32)
    same = narrow("mirage").load(saved(tmp_path / "other.pth", {"model": other}))
    assert np.array_equal(encoder.tokens(VIEW), same.tokens(VIEW))
    moved = weights | {"input_adapters.bscan.pos_emb": weights["input_adapters.bscan.pos_emb"].flip(2)}
    assert not np.allclose(
        narrow("mirage").load(saved(tmp_path / "moved.pth", moved)).tokens(VIEW), encoder.tokens(VIEW)
    )


def test_octcube_reads_both_kinds_of_attention(layouts, tmp_path):
    weights = layouts["octcube"]()
    encoder = narrow("octcube").load(saved(tmp_path / "flash.pth", weights))
    apart = {}
    for name, value in weights.items():
        if ".mixer.Wqkv." in name:
            for letter, third in zip("qkv", value.chunk(3), strict=True):
                apart[name.replace(".mixer.Wqkv.", f".attn.{letter}.")] = third
        else:
            apart[name.replace(".mixer.out_proj.", ".attn.proj.")] = value
    same = narrow("octcube").load(saved(tmp_path / "apart.pth", apart))
    assert np.allclose(same.tokens(VIEW), encoder.tokens(VIEW), atol=1e-6)


def test_octcube_ends_as_its_pretraining_did_without_the_last_sum(layouts, tmp_path):
    weights = layouts["octcube"]()
    path = saved(tmp_path / "weights.pth", weights)
    silent = dict(weights)
    silent["blocks.1.mlp.fc2.weight"] = torch.zeros_like(weights["blocks.1.mlp.fc2.weight"])
    silent["blocks.1.mlp.fc2.bias"] = torch.zeros_like(weights["blocks.1.mlp.fc2.bias"])
    tokens = narrow("octcube").load(saved(tmp_path / "silent.pth", silent)).tokens(VIEW)
    assert np.allclose(tokens, weights["norm.bias"].numpy(), atol=1e-6)  # nothing is left but the norm's own bias
    assert not np.allclose(narrow("octcube").load(path).tokens(VIEW), tokens)


WRAPPED = {
    "as it is": lambda weights: weights,
    "MAE": lambda weights: {"model": weights, "epoch": 3, "args": argparse.Namespace(lr=1.0)},
    "DINO": lambda weights: {"student": {}, "teacher": {f"module.backbone.{n}": v for n, v in weights.items()}},
    "compiled": lambda weights: {"state_dict": {f"_orig_mod.{n}": v for n, v in weights.items()}},
    "half": lambda weights: {n: v.half() for n, v in weights.items()},
    "chunks": lambda weights: {n.replace("blocks.", "blocks.0."): v for n, v in weights.items()},
}


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_wrappings_of_training_scripts_are_taken_off(layouts, tmp_path, wrapping):
    plain = narrow("dinov2").load(saved(tmp_path / "plain.pth", layouts["dinov2"]()))
    wrapped = narrow("dinov2").load(saved(tmp_path / "wrapped.pth", WRAPPED[wrapping](layouts["dinov2"]())))
    assert np.allclose(wrapped.tokens(VIEW), plain.tokens(VIEW), atol=2e-2 if wrapping == "half" else 1e-6)


def test_safetensors_are_read(layouts, tmp_path):
    weights = layouts["mirage"]()
    save_file({f"model.{name}": value for name, value in weights.items()}, tmp_path / "weights.safetensors")
    assert read_state_dict(tmp_path / "weights.safetensors").keys() == weights.keys()


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in PUBLISHED for size in PUBLISHED[name].sizes if size <= 1024]
)
def test_the_published_shapes_are_networks(name, size):
    published = PUBLISHED[name]
    blocks, heads = published.sizes[size]
    shape = ViTShape(size, blocks, heads, 4 * size, 3, published.patch, published.grid)
    with torch.device("meta"):
        network = VisionTransformer(shape)
    parameters = sum(value.numel() for value in network.parameters())
    assert parameters == pytest.approx({384: 22e6, 768: 86e6, 1024: 304e6}[size], rel=0.04)
    assert network.pos_embed.shape[1] == 1 + np.prod(published.grid)


def test_retfound_has_the_shapes_of_its_file():
    """The tensors of RETFound_oct_weights.pth's encoder, as models_mae.py of its repository defines them."""
    published = PUBLISHED["retfound"]
    with torch.device("meta"):
        found = VisionTransformer(ViTShape(1024, 24, 16, 4096, 3, (16, 16), published.grid)).state_dict()
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    assert len(shapes) == 6 + 24 * 12
    assert shapes["pos_embed"] == (1, 197, 1024)
    assert shapes["patch_embed.proj.weight"] == (1024, 3, 16, 16)
    assert shapes["blocks.23.attn.qkv.weight"] == (3072, 1024)
    assert shapes["blocks.23.mlp.fc1.weight"] == (4096, 1024)


def test_a_file_of_another_encoder_is_named(layouts, tmp_path):
    path = saved(tmp_path / "weights.pth", layouts["mirage"]())
    with pytest.raises(CheckpointError, match=r"lacks blocks\.0.*its names are those of mirage: write mirage:PATH"):
        load_external(f"retfound:{path}")
    path = saved(tmp_path / "dino.pth", layouts["dinov2"]())
    with pytest.raises(CheckpointError, match=r"its names are those of dinov2 and .*: write dinov2:PATH"):
        load_external(f"mirage:{path}")
    tuned = {name: value for name, value in layouts["retfound"]().items() if not name.startswith("norm.")}
    with pytest.raises(CheckpointError, match=r"lacks norm\.weight; is it the file that github"):
        load_external(f"retfound:{saved(tmp_path / 'tuned.pth', tuned)}")
    path = saved(tmp_path / "resnet.pth", {"conv1.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"holds 1 tensors such as conv1\.weight.*is it the file that github"):
        load_external(f"mirage:{path}")


def test_another_size_than_the_published_ones_is_refused(layouts, tmp_path):
    path = saved(tmp_path / "weights.pth", layouts["retfound"]())
    with pytest.raises(CheckpointError, match=r"width 16, 2 blocks .* published with width 1024 with 24 blocks"):
        load_external(f"retfound:{path}")


def test_tensors_that_do_not_fit_are_named(layouts, tmp_path):
    weights = layouts["retfound"]()
    weights["blocks.1.norm2.bias"] = torch.zeros(17)
    with pytest.raises(CheckpointError, match=r"blocks\.1\.norm2\.bias is \(17,\) in the file, expected \(16,\)"):
        narrow("retfound").load(saved(tmp_path / "odd.pth", weights))
    del weights["blocks.1.norm2.bias"]
    with pytest.raises(CheckpointError, match=r"blocks\.1\.norm2\.bias is absent"):
        narrow("retfound").load(saved(tmp_path / "less.pth", weights))
    more = layouts["retfound"]() | {"extra.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"extra\.weight is \(1,\) in the file, expected absent"):
        narrow("retfound").load(saved(tmp_path / "more.pth", more))


@pytest.mark.parametrize("text", ["version https://git-lfs.github.com/spec/v1\n", "person_id\tage\n1\t60\n", "hello"])
def test_a_text_file_is_refused_without_the_words_of_torch(tmp_path, text):
    (tmp_path / "weights.pth").write_text(text)
    with pytest.raises(CheckpointError, match="is a text file and no checkpoint: fetch the weights") as caught:
        load_external(f"retfound:{tmp_path / 'weights.pth'}")
    assert len(str(caught.value).splitlines()) == 1
    (tmp_path / "weights.pth").write_bytes(b"\x80\x02}q\xffno pickle")
    with pytest.raises(CheckpointError, match=r"weights\.pth") as caught:
        load_external(f"retfound:{tmp_path / 'weights.pth'}")
    assert "file an issue" not in str(caught.value)


class Malicious:
    """Unpickled without `weights_only`, it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[Path, str]]:
        return Path.write_text, (self.marker, "ran")


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"model": Malicious(tmp_path / "ran")}, path)
    with pytest.raises(CheckpointError, match="none of its code was run"):
        read_state_dict(path)
    path.write_bytes(pickle.dumps(Malicious(tmp_path / "ran"), protocol=2))
    with pytest.raises(CheckpointError):
        read_state_dict(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is damaged"),
        (b"no weights", "is a text file"),
        (b"\x00no weights", "none of its code was run|is damaged"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, words):
    (tmp_path / "weights.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_state_dict(tmp_path / "weights.pth")
    (tmp_path / "weights.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_state_dict(tmp_path / "weights.safetensors")


def test_files_without_a_network_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no tensors, but epoch, lr"):
        read_state_dict(saved(tmp_path / "weights.pth", {"epoch": 1, "lr": 0.1}))
    with pytest.raises(CheckpointError, match="holds a list"):
        read_state_dict(saved(tmp_path / "list.pth", [1]))
    with pytest.raises(UsageError, match="no file at"):
        load_external(f"retfound:{tmp_path / 'absent.pth'}")
    with pytest.raises(UsageError, match="write NAME:PATH"):
        load_external("retfound:")


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.zeros(3, dtype=torch.float4_e2m1fn_x2)]
)
def test_tensors_that_are_not_plain_are_refused_in_one_line(tmp_path, tensor):
    with pytest.raises(CheckpointError, match=r"a\.b is not a plain tensor"):
        read_state_dict(saved(tmp_path / "weights.pth", {"model": {"a.b": tensor}}))


def test_a_container_that_holds_itself_is_refused(tmp_path):
    content = {"epoch": 1}
    content["model"] = {"teacher": content}
    with pytest.raises(CheckpointError, match="holds no tensors, but teacher"):
        read_state_dict(saved(tmp_path / "weights.pth", content))


def test_an_expected_checksum_is_verified(layouts, tmp_path):
    path = saved(tmp_path / "weights.pth", layouts["retfound"]())
    named = Path(f"{path}#sha256={file_sha256(path).upper()}")
    assert narrow("retfound").load(named).path == path
    with pytest.raises(UsageError, match="expected abc: fetch it again"):
        narrow("retfound").load(Path(f"{path}#sha256=abc"))


def test_addresses_differ_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_external("retfound:weights.pth")
    assert not is_external("unheard_of:weights.pth")
    assert not is_external("gs://bucket/run")
    (tmp_path / "retfound:run").mkdir()
    assert not is_external("retfound:run")  # a folder of that name
    with pytest.raises(UsageError, match=r"NAME:PATH with one of .*mirage.*retfound"):
        load_external("unheard_of:weights.pth")


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"unknown encoder 'retfund': one of .*retfound"):
        check_address("retfund:weights.pth")
    for location in ("gs://bucket/run", "phantom-tiny", "runs/a:b", "retfound:weights.pth"):
        check_address(location)
    (tmp_path / "mine:1").mkdir()
    check_address("mine:1")
