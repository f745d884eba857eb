"""Encoders of other projects, with random weights written as their libraries write them: read, applied, refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.export import export_encoder
from octjepa.encoders.external import is_external, load_external
from octjepa.encoders.external.folders import from_architecture
from octjepa.errors import CheckpointError, UsageError, install_command
from octjepa.model import VJEPA3D
from synthetic import TEST_SIZE, small_recipe

VIEW = np.random.default_rng(0).integers(0, 255, size=(6, 32, 32), dtype=np.uint8)


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    """A 2D vision transformer of transformers, of seconds."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=16
    )
    ViTModel(config).save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(
        '{"image_mean": [0.4, 0.4, 0.4], "image_std": [1, 1, 1]}'
    )
    return tmp_path / "vit"


def _video(folder: Path) -> Path:
    from transformers import VJEPA2Config, VJEPA2Model

    config = VJEPA2Config(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        crop_size=32,
        patch_size=16,
        frames_per_clip=4,
        tubelet_size=2,
        pred_hidden_size=24,
        pred_num_hidden_layers=1,
        pred_num_attention_heads=2,
        mlp_ratio=2,
    )
    VJEPA2Model(config).save_pretrained(folder)
    return folder


def _monai(folder: Path, network: str, arguments: dict, **more: object) -> Path:
    from monai.networks import nets

    folder.mkdir()
    made = getattr(nets, network)(**arguments)
    save_file({name: value.contiguous() for name, value in made.state_dict().items()}, folder / "model.safetensors")
    (folder / "monai.json").write_text(json.dumps({"network": network, "arguments": arguments, **more}))
    return folder


def test_a_vision_transformer_sees_every_b_scan(vit):
    encoder = load_external(vit)
    tokens = encoder.tokens(VIEW)
    assert tokens.shape == (6 * 4, 16)  # 6 B-scans of 4 patches, without the class token
    assert encoder.grid(VIEW.shape) is None
    assert np.array_equal(encoder.embed(VIEW), tokens.mean(axis=0))
    assert encoder.embed(VIEW, "mean_std_max").shape == (48,)
    # As the library itself computes it, B-scan by B-scan.
    from transformers import ViTModel

    image = torch.from_numpy(VIEW[3] / 255.0).float().expand(1, 3, 32, 32) - 0.4
    with torch.inference_mode():
        expected = ViTModel.from_pretrained(vit).eval()(pixel_values=image).last_hidden_state[0]
    assert np.allclose(tokens[12:16], expected.numpy()[1:], atol=1e-5)
    stored = {"files": encoder.architecture()["files"]}  # of an encoder that an earlier version tuned
    earlier = from_architecture("transformers", stored)
    earlier.network.load_state_dict(encoder.network.state_dict())
    assert np.allclose(earlier.tokens(VIEW)[15:20], expected.numpy(), atol=1e-5)
    assert earlier.architecture() == stored
    assert earlier.untrained().tokens(VIEW).shape == (6 * 5, 16)


@pytest.mark.parametrize("registers", [0, 3])
def test_class_and_register_tokens_are_not_pooled_with_patches(tmp_path, registers):
    """As the same weights give them by NAME:PATH."""
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    config = Dinov2WithRegistersConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        patch_size=16,
        image_size=32,
        num_register_tokens=registers,
    )
    Dinov2WithRegistersModel(config).save_pretrained(tmp_path / "dino")
    assert load_external(tmp_path / "dino").tokens(VIEW).shape == (6 * 4, 16)


def test_images_are_not_normalised_where_the_folder_says_so(vit):
    normalised = load_external(vit).tokens(VIEW)
    settings = {"do_normalize": False, "image_mean": [0.4, 0.4, 0.4], "image_std": [1, 1, 1]}
    (vit / "preprocessor_config.json").write_text(json.dumps(settings))
    plain = load_external(vit).tokens(VIEW)
    assert not np.allclose(plain, normalised)
    (vit / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}')
    assert np.array_equal(load_external(vit).tokens(VIEW), plain)


def test_a_masked_autoencoder_sees_every_patch_in_order(tmp_path):
    """The encoder of ViTMAE in transformers leaves out three quarters of the patches at random by default."""
    from transformers import ViTMAEConfig, ViTMAEModel, ViTModel

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTMAEConfig(**shape, image_size=32, patch_size=8)
    ViTMAEModel(config).save_pretrained(tmp_path / "mae")
    encoder = load_external(tmp_path / "mae")
    tokens = encoder.tokens(VIEW)
    assert tokens.shape == (6 * 16, 16)
    assert np.array_equal(tokens, encoder.tokens(VIEW))
    assert encoder.untrained().tokens(VIEW).shape == tokens.shape
    plain = ViTModel.from_pretrained(tmp_path / "mae").eval()  # the same layers without masks
    image = (torch.from_numpy(VIEW[3] / 255.0).float().expand(1, 3, 32, 32) - 0.5) / 0.5
    with torch.inference_mode():
        expected = plain(pixel_values=image).last_hidden_state[0]
    assert np.allclose(tokens[3 * 16 : 4 * 16], expected.numpy()[1:], atol=1e-5)


def test_a_convolutional_network_gives_the_positions_of_its_map(tmp_path):
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ResNetModel(config).save_pretrained(tmp_path / "resnet")
    tokens = load_external(tmp_path / "resnet").tokens(VIEW)
    assert tokens.shape[1] == 16
    assert len(tokens) % 6 == 0


def test_video_weights_see_b_scans_as_frames(tmp_path):
    encoder = load_external(_video(tmp_path / "video"))
    tokens = encoder.tokens(VIEW)
    assert tokens.shape == (2 * 2 * 2, 24)
    assert encoder.grid(VIEW.shape) == (2, 2, 2)
    moved = VIEW.copy()
    moved[2] = 255 - moved[2]  # frames 0, 2, 3 and 5 are the four evenly chosen ones
    assert not np.allclose(encoder.tokens(moved), tokens)
    unseen = VIEW.copy()
    unseen[1] = 0
    assert np.array_equal(encoder.tokens(unseen), tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "arguments", "width"),
    [
        ("resnet10", {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 2, "widen_factor": 0.125}, 64),
        (
            "DenseNet121",
            {
                "spatial_dims": 3,
                "in_channels": 1,
                "out_channels": 2,
                "init_features": 8,
                "growth_rate": 4,
                "block_config": [1, 1, 1, 1],
            },
            None,
        ),
        (
            "SwinUNETR",
            {
                "in_channels": 1,
                "out_channels": 2,
                "feature_size": 12,
                "depths": [1, 1, 1, 1],
                "num_heads": [1, 2, 4, 8],
            },
            192,
        ),
        (
            "ViTAutoEnc",
            {
                "in_channels": 1,
                "img_size": [32, 32, 32],
                "patch_size": [16, 16, 16],
                "hidden_size": 24,
                "mlp_dim": 24,
                "num_layers": 1,
                "num_heads": 2,
            },
            24,
        ),
        (
            "SegResNet",
            {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "init_filters": 8, "blocks_down": [1, 1, 1, 1]},
            64,
        ),
    ],
)
def test_three_dimensional_networks_of_monai(tmp_path, network, arguments, width):
    if network in ("SwinUNETR", "ViTAutoEnc"):
        pytest.importorskip("einops")
    encoder = load_external(_monai(tmp_path / "net", network, arguments, input_size=[32, 32, 32]))
    tokens = encoder.tokens(VIEW)
    assert tokens.ndim == 2
    assert width in (None, tokens.shape[1])
    assert np.isfinite(tokens).all()
    grid = encoder.grid(VIEW.shape)
    assert (network == "ViTAutoEnc") == (grid is None)
    assert grid is None or np.prod(grid) == len(tokens)
    assert np.array_equal(tokens, encoder.tokens(VIEW))  # nothing is drawn in use
    other = encoder.untrained()
    assert not np.allclose(other.tokens(VIEW), tokens)


@pytest.mark.parametrize(
    "arguments",
    [
        {"spatial_dims": 3, "num_classes": 2, "widen_factor": 0.125},  # of three channels by default
        {"spatial_dims": 2, "n_input_channels": 1, "num_classes": 2, "widen_factor": 0.125},
    ],
)
def test_a_network_of_monai_that_takes_no_volume_is_refused_in_one_line(tmp_path, arguments):
    encoder = load_external(_monai(tmp_path / "net", "resnet10", arguments, input_size=[32, 32, 32]))
    for use in (encoder.tokens, lambda view: encoder.grid(view.shape)):
        with pytest.raises(UsageError, match=r"resnet10 does not take a volume of one channel and 32 x 32 x 32 voxels"):
            use(VIEW)


def test_a_volume_shrinks_by_means_and_no_voxel_is_skipped(tmp_path):
    arguments = {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 2, "widen_factor": 0.125}
    encoder = load_external(_monai(tmp_path / "net", "resnet10", arguments, input_size=[8, 32, 32]))
    volume = np.random.default_rng(1).integers(0, 255, (6, 96, 96), dtype=np.uint8)
    moved = volume.copy()
    moved[:, 0::3], moved[:, 2::3] = volume[:, 2::3], volume[:, 0::3]  # a third of the rows is between the others
    tokens = encoder.tokens(volume)
    assert np.allclose(tokens, encoder.tokens(moved), atol=1e-5)
    moved[:, 0::3] = 255 - moved[:, 0::3]
    assert not np.allclose(tokens, encoder.tokens(moved), atol=1e-3)
    earlier = from_architecture("monai", {"files": encoder.architecture()["files"]})
    earlier.network.load_state_dict(encoder.network.state_dict())
    assert not np.allclose(earlier.tokens(volume), tokens, atol=1e-3)


def test_the_untrained_twin_is_always_the_same_and_leaves_chance_alone(vit):
    encoder = load_external(vit)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = encoder.untrained(), encoder.untrained()
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(first.tokens(VIEW), second.tokens(VIEW))
    assert not np.allclose(first.tokens(VIEW), encoder.tokens(VIEW))


def test_our_own_export_for_transformers_is_not_taken_for_an_encoder_of_another_project(tmp_path):
    """Its images would be normalised otherwise, and the record of its training volumes would be lost."""
    recipe = small_recipe(model={**TEST_SIZE, "positions": "rope_tiled"})
    encoder = PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, "mine", {"a"})
    export_encoder(encoder, "hf", tmp_path / "hf")
    with pytest.raises(UsageError, match=r"was exported by octjepa for transformers.* --format safetensors"):
        load_external(tmp_path / "hf")


def test_a_pickle_is_never_read(vit):
    (vit / "model.safetensors").rename(vit / "pytorch_model.bin")
    with pytest.raises(UsageError, match="only read from safetensors"):
        load_external(vit)


def test_code_beside_weights_is_never_run(vit):
    config = json.loads((vit / "config.json").read_text())
    marker = vit / "ran"
    (vit / "mine.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    (vit / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="model_type is 'mine'"):
        load_external(vit)
    assert not marker.exists()


@pytest.mark.slow
def test_weights_that_would_be_random_in_part_are_refused(vit, tmp_path):
    weights = load_file(vit / "model.safetensors")
    incomplete = {name: value for name, value in weights.items() if "layernorm_before" not in name}
    save_file(incomplete, vit / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="would be random"):
        load_external(vit)
    without_pooler = {name: value for name, value in weights.items() if not name.startswith("pooler")}
    save_file(without_pooler, vit / "model.safetensors", {"format": "pt"})
    load_external(vit)  # it is not used
    arguments = {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 2, "widen_factor": 0.125}
    net = _monai(tmp_path / "net", "resnet10", arguments)
    save_file({"conv1.weight": torch.zeros(1)}, net / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not fit"):
        load_external(net)
    (net / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="damaged"):
        load_external(net)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", "{", "not JSON at line 1"),
        ("config.json", "[]", "it holds a list"),
        ("monai.json", '{"network": "os.system"}', "known are resnet10"),
        (
            "monai.json",
            '{"network": "resnet10", "arguments": {"absent": 1}}',
            "argument 'absent' of resnet10 is not read",
        ),
    ],
)
def test_descriptions_that_describe_nothing_are_refused(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    assert is_external(tmp_path)
    with pytest.raises(UsageError, match=words):
        load_external(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UsageError, match="not a known encoder"):
        load_external(tmp_path)


@pytest.mark.slow
def test_einops_is_named_where_a_network_of_monai_needs_it(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "einops", None)
    (tmp_path / "monai.json").write_text('{"network": "SwinUNETR", "arguments": {}}')
    with pytest.raises(UsageError, match="SwinUNETR needs einops"):
        load_external(tmp_path)


def test_a_library_that_is_not_there_is_named_with_its_extra(vit, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=re.escape(install_command("hf"))):
        load_external(vit)
    (tmp_path / "monai.json").write_text('{"network": "resnet10", "arguments": {}}')
    monkeypatch.setitem(sys.modules, "monai.networks", None)
    with pytest.raises(UsageError, match=re.escape(install_command("monai"))):
        load_external(tmp_path)


def test_what_builds_each_network_is_stored_as_json_and_builds_it_again(vit, tmp_path):
    """Of a folder's encoder, without the folder; initial weights are other ones until they are loaded."""
    arguments = {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 2, "widen_factor": 0.125}
    for folder in (vit, _video(tmp_path / "video"), _monai(tmp_path / "net", "resnet10", arguments)):
        encoder = load_external(folder)
        stored = json.loads(json.dumps(encoder.architecture()))
        again = from_architecture(encoder.kind, stored)
        again.network.load_state_dict(encoder.network.state_dict())
        assert np.array_equal(again.tokens(VIEW), encoder.tokens(VIEW))
        assert again.untrained().tokens(VIEW).shape == encoder.tokens(VIEW).shape
        assert encoder.width(VIEW.shape) == encoder.tokens(VIEW).shape[1]
    with pytest.raises(ValueError, match=r"run\.py is not a file that describes"):
        from_architecture("transformers", {"files": {"../run.py": {}}})
