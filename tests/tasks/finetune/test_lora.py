"""LoRA in fine-tuning: only adapters learn, they are merged, and what is written knows nothing of them."""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from octjepa.checkpoint.folder import list_checkpoints, read_manifest, read_tensors
from octjepa.config import science, to_yaml
from octjepa.distributed.signals import Interrupted
from octjepa.embed.embedding import embed_store
from octjepa.encoders import load_encoder
from octjepa.encoders.external import load_external
from octjepa.errors import RecipeError, UsageError
from octjepa.files import read_json_lines
from octjepa.tasks.finetune.external import load_start, tuned_network
from octjepa.tasks.finetune.folder import check_folder
from octjepa.tasks.finetune.inference import predict_store
from octjepa.tasks.finetune.lora import add_adapters
from octjepa.tasks.finetune.network import TunedNetwork
from octjepa.tasks.finetune.predict import load_tuned
from octjepa.tasks.finetune.recipe import Lora, load_recipe
from octjepa.tasks.finetune.training import TuningTask
from planted import RECIPE

needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed: the extra lora")
LORA = ("lora.rank=4", "layer_decay=1", "encoder_lr=3e-3")
SHORT = ("stages.head=2", "stages.last=2", "stages.all=4", "validate_every=2", "save_every=3", "micro_batch=4")
CODE = """
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv3d(1, 16, (4, 8, 8), (4, 8, 8))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)])

    def forward(self, images):
        x = self.patches(images - 0.4).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return x


def create(path):
    torch.manual_seed(0 if path is None else 1)
    return Network()
"""


@pytest.fixture
def network(source) -> TunedNetwork:
    return TunedNetwork(load_encoder(source / "encoder.safetensors"), [("binary", 2)])


@pytest.fixture
def mine(install_package) -> str:
    install_package("linear_network_of_a_user", "octjepa.encoders", "linear = linear_network_of_a_user:create", CODE)
    return "linear:weights"


def tensors_of(message, *files) -> dict[str, torch.Tensor]:
    return {name: value for file in files for name, value in read_tensors(Path(message["checkpoint"]), file).items()}


def test_without_adapters_the_recipe_and_its_hash_are_those_of_before(tmp_path) -> None:
    plain = load_recipe("finetune")
    assert plain.lora.rank == 0
    assert "lora" not in science(plain)
    assert science(load_recipe("finetune", ["lora.rank=8"]))["lora"] == {"rank": 8, "alpha": 16.0, "targets": ()}
    (tmp_path / "recipe.yaml").write_text(to_yaml(plain))
    assert load_recipe(tmp_path / "recipe.yaml").lora == Lora()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["lora.alpha=8"], r"lora\.alpha is unused without adapters: give lora\.rank, such as 8"),
        (["lora.targets=[qkv]"], r"lora\.targets is unused without adapters"),
        (["lora.rank=8", "stages.last=0", "stages.all=0"], "no stage trains: give stages.last or stages.all updates"),
        (["lora.rank=8", "scratch=true"], "scratch trains all weights"),
        (["lora.rank=-1"], r"lora\.rank"),
        (["lora.ranks=8"], r"lora\.ranks"),
    ],
)
def test_keys_that_mean_nothing_are_refused(overrides, expected) -> None:
    with pytest.raises(RecipeError, match=expected):
        load_recipe("finetune", overrides)


def test_without_peft_the_message_names_what_to_install(tune, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"lora\.rank needs peft: pip install .*(lora|peft)"):
        tune(tmp_path / "out", *LORA)
    assert not (tmp_path / "out" / "run.json").exists()


def test_a_typing_error_in_the_targets_leaves_the_folder_free(tune, tmp_path) -> None:
    """The corrected command was refused with and without --resume."""
    with pytest.raises(UsageError, match=r"lora\.targets: the encoder has no linear layer 'qvk'"):
        tune(tmp_path / "out", *LORA, "lora.targets=[qvk]")
    check_folder(tmp_path / "out", resume=False)


@pytest.mark.slow
@needs_peft
def test_adapters_begin_at_nothing_and_learn_in_stages_alone(network, planted) -> None:
    volume = planted.read("volume0003")
    before = network.pool([volume])
    depth = network.depth
    recipe = load_recipe("finetune", ["lora.rank=4", "encoder_lr=0.01", "layer_decay=0.5"])
    network.add_adapters(recipe, volume)
    assert torch.equal(network.pool([volume]), before)
    assert network.depth == depth
    each = {name for name in dict(network.encoder.named_parameters()) if "lora_" in name}
    assert len(each) == depth * 4 * 2  # qkv, out and two of the MLP; two matrices each
    for blocks, learning in ((0, 0), (2, 2), (depth + 1, depth)):
        network.unfreeze(blocks)
        names = {name for name, value in network.encoder.named_parameters() if value.requires_grad}
        assert names <= each
        assert len(names) == learning * 8
    trained = {id(value) for group in network.groups(recipe) for value in group["params"]}
    heads = {id(value) for part in (network.heads, network.pooling) for value in part.parameters()}
    assert trained - heads == {id(value) for name, value in network.encoder.named_parameters() if name in each}
    assert {group["peak"] for group in network.groups(recipe)} >= {0.005, 0.0025}


@needs_peft
def test_the_start_depends_on_the_seed_alone(source) -> None:
    def starts(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(np.random.default_rng().integers(1 << 30))
        return add_adapters(load_encoder(source / "encoder.safetensors").encoder, Lora(rank=4), seed).parameters

    assert all(map(torch.equal, starts(0), starts(0)))
    assert not all(map(torch.equal, starts(0), starts(1)))


@needs_peft
def test_targets_choose_layers_by_the_end_of_their_names(source) -> None:
    def adapted(*targets: str) -> set[str]:
        encoder = load_encoder(source / "encoder.safetensors").encoder
        return set(add_adapters(encoder, Lora(rank=2, targets=targets), 0).layers)

    assert {name.split(".", 2)[2] for name in adapted("qkv", "mlp.2")} == {"attention.qkv", "mlp.2"}
    with pytest.raises(UsageError, match=r"no linear layer 'query'\. It has .*attention\.qkv, attention\.out, mlp\.0"):
        adapted("query")
    with pytest.raises(UsageError, match="no linear layer in its blocks"):
        add_adapters(nn.Sequential(nn.Conv1d(1, 1, 1)), Lora(rank=2), 0)


@needs_peft
def test_a_layer_that_is_used_without_being_called_is_refused() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.blocks[0]["a"](x), self.blocks[0]["b"].weight)

    fused = Fused()
    adapters = add_adapters(fused, Lora(rank=2), 0)
    with pytest.raises(UsageError, match=r"uses 1 of 2 adapted layers without calling them.*blocks\.0\.b\. Name"):
        adapters.require_calls(lambda: fused(torch.zeros(1, 4)))
    called = add_adapters(Fused(), Lora(rank=2, targets=("a",)), 0)
    called.require_calls(lambda: called.tuner.model(torch.zeros(1, 4)))


@needs_peft
def test_merged_weights_compute_what_the_adapters_computed(network, planted) -> None:
    volume = planted.read("volume0003")
    names = list(network.encoder.state_dict())
    weights = {name: value.clone() for name, value in network.encoder.state_dict().items()}
    start = network.pool([volume])
    network.add_adapters(load_recipe("finetune", ["lora.rank=4"]), volume)
    with torch.no_grad():
        for name, value in network.encoder.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.02)
    adapted = network.pool([volume])
    assert not torch.allclose(adapted, start, atol=1e-3)
    base = {name.replace(".base_layer", ""): value for name, value in network.encoder.state_dict().items()}
    assert all(torch.equal(base[name], value) for name, value in weights.items())
    network.merge_adapters()
    assert torch.allclose(network.pool([volume]), adapted, atol=1e-4)
    assert list(network.encoder.state_dict()) == names
    assert not hasattr(network.encoder, "peft_config")
    changed = {name for name, value in network.encoder.state_dict().items() if not torch.equal(value, weights[name])}
    assert len(changed) == network.depth * 4
    assert all(name.endswith("weight") for name in changed)


@needs_peft
@pytest.mark.slow
def test_a_tuning_with_adapters_writes_an_encoder_that_needs_no_peft(
    tune, planted, able_encoder, tmp_path, monkeypatch
):
    message = tune(tmp_path / "out", *LORA, checkpoint=able_encoder)
    assert message["metrics"]["auroc"]["value"] > 0.75  # frozen: 0.71
    before = load_encoder(able_encoder).encoder.state_dict()
    monkeypatch.setitem(sys.modules, "peft", None)
    after = load_encoder(tmp_path / "out").encoder.state_dict()
    assert list(after) == list(before)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("blocks.") and name.endswith("weight") and "norm" not in name for name in changed)
    assert read_manifest(Path(message["checkpoint"]))["tuned"]["settings"]["lora"]["rank"] == 4
    table = pd.read_parquet(tmp_path / "out" / "predictions.parquet")
    row = table[(table["level"] == "volume") & (table["split"] == "test")].iloc[0]
    answer = load_tuned(tmp_path / "out").predict(planted.read(row["volume_id"]))
    assert list(answer["mark"]["balanced"].values()) == pytest.approx(list(row["scores"]), abs=1e-6)
    assert predict_store(tmp_path / "out", planted, tmp_path / "predicted").trained_on == 40
    embed_store(tmp_path / "out", planted, tmp_path / "tuned.parquet")


@needs_peft
@pytest.mark.slow
def test_a_stopped_tuning_with_adapters_resumes_to_the_same_weights(tune, tmp_path, monkeypatch) -> None:
    files = ("model.safetensors", "head.safetensors")
    alone = tune(tmp_path / "alone", *LORA, *SHORT)
    honest = TuningTask.losses

    def losses(task, learner, batch, update, micro_batch):
        if update == 5:
            signal.raise_signal(signal.SIGTERM)
        return honest(task, learner, batch, update, micro_batch)

    with monkeypatch.context() as patch:
        patch.setattr(TuningTask, "losses", losses)
        with pytest.raises(Interrupted):
            tune(tmp_path / "out", *LORA, *SHORT)
    (state, *_) = list_checkpoints(tmp_path / "out" / "checkpoints")[-1:]
    assert any("lora_B" in name for name in read_tensors(state, "model.safetensors"))
    resumed = tune(tmp_path / "out", *LORA, *SHORT, resume=True)
    ours, expected = tensors_of(resumed, *files), tensors_of(alone, *files)
    assert ours.keys() == expected.keys()
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []
    assert read_json_lines(tmp_path / "out" / "metrics.jsonl") == read_json_lines(tmp_path / "alone" / "metrics.jsonl")
    assert resumed["metrics"] == alone["metrics"]


@needs_peft
@pytest.mark.slow
def test_an_encoder_of_another_project_is_adapted_and_read_without_peft(tune, planted, mine, tmp_path, monkeypatch):
    view = np.random.default_rng(0).integers(0, 255, size=RECIPE.preprocessing.image_size, dtype=np.uint8)
    tune(tmp_path / "out", *LORA, *SHORT, checkpoint=mine)
    monkeypatch.setitem(sys.modules, "peft", None)
    after, before = load_external(tmp_path / "out"), load_external(mine)
    assert list(after.network.state_dict()) == list(before.network.state_dict())
    assert torch.equal(after.network.patches.weight, before.network.patches.weight)
    assert not np.allclose(after.tokens(view), before.tokens(view))
    assert load_tuned(tmp_path / "out").predict(planted.read("volume0003"))["mark"]["predicted"] in ("0", "1")


@needs_peft
@pytest.mark.filterwarnings("ignore")
def test_a_transformer_of_hugging_face_is_adapted_in_all_its_blocks(planted, tmp_path) -> None:
    from transformers import ViTConfig, ViTModel

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ViTModel(ViTConfig(image_size=32, patch_size=16, **size)).save_pretrained(tmp_path / "vit")
    network = tuned_network(load_start(tmp_path / "vit", RECIPE.preprocessing), [("binary", 2)])
    names = list(network.encoder.state_dict())
    network.add_adapters(load_recipe("finetune", ["lora.rank=2"]), planted.read("volume0003"))
    adapted = {name for name in dict(network.encoder.named_parameters()) if "lora_A" in name}
    assert len(adapted) == 2 * 6  # query, key, value, output and two of the MLP
    network.merge_adapters()
    assert list(network.encoder.state_dict()) == names
