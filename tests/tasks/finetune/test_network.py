"""The tuned network's parts: what learns when, drop-path without a state, and a loss that adds up over processes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from octjepa.config import to_yaml
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.errors import RecipeError
from octjepa.evaluate import networks
from octjepa.evaluate.networks import TokenBatch
from octjepa.evaluate.probe import ProbeResult
from octjepa.model import VJEPA3D
from octjepa.model.blocks import Stack
from octjepa.tasks.finetune.network import TunedNetwork, draw_paths, each_loss
from octjepa.tasks.finetune.recipe import RECIPES, FinetuneRecipe, load_recipe
from octjepa.tasks.finetune.training import set_rates
from octjepa.tasks.finetune.tuning_data import prepare_tuning_data
from octjepa.views.tokens import grid_coordinates
from planted import write_encoder, write_labels
from synthetic import TEST_SIZE, small_recipe

DEPTH = 6


@pytest.fixture
def network(tmp_path) -> TunedNetwork:
    path = write_encoder(tmp_path / "encoder.safetensors", small_recipe(model=TEST_SIZE))
    return TunedNetwork(load_encoder(path), [("binary", 2), ("regression", 0)])


def learning(network: TunedNetwork) -> set[str]:
    return {".".join(name.split(".")[:3]) for name, one in network.named_parameters() if one.requires_grad}


def test_stages_free_the_head_then_the_last_blocks_then_all(network: TunedNetwork) -> None:
    settings = load_recipe("finetune", ["stages.head=2", "stages.last=3", "stages.all=4"])
    assert [settings.learning_blocks(update, DEPTH) for update in range(9)] == [0, 0, 2, 2, 2, 7, 7, 7, 7]
    network.unfreeze(0)
    assert {name.split(".")[0] for name in learning(network)} == {"heads", "pooling"}
    network.unfreeze(2)
    assert {name for name in learning(network) if name.startswith("encoder")} == {
        "encoder.blocks.4",
        "encoder.blocks.5",
        "encoder.norm.weight",
        "encoder.norm.bias",
    }
    network.unfreeze(DEPTH + 1)
    assert all(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.slow
def test_rates_fall_by_layer_warm_up_when_they_begin_and_never_rise_again(network: TunedNetwork) -> None:
    settings = load_recipe(
        "finetune",
        [
            "stages.head=20",
            "stages.last=20",
            "stages.all=60",
            "warmup=5",
            "layer_decay=0.5",
            "head_lr=0.01",
            "encoder_lr=0.004",
            "min_lr_ratio=0.1",
        ],
    )
    optimizer = torch.optim.AdamW(network.groups(settings))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(network.parameters()))
    assert all((group["weight_decay"] == 0) == (group["params"][0].ndim < 2) for group in optimizer.param_groups)
    train = settings.sampling(network.pretrained.recipe).train
    curves: dict[int, list[float]] = {}
    for update in range(100):
        set_rates(optimizer, settings, train, update)
        for number, group in enumerate(optimizer.param_groups):
            curves.setdefault(number, []).append(group["lr"])
    begins = {
        id(parameter): (next(u for u, rate in enumerate(curves[number]) if rate > 0), group["peak"])
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    assert begins[id(network.heads[0].linear.weight)] == (0, 0.01)
    last, first = network.encoder.blocks[DEPTH - 1], network.encoder.blocks[0]
    assert begins[id(last.attention.qkv.weight)] == (20, 0.002)
    assert begins[id(first.attention.qkv.weight)] == (40, pytest.approx(0.004 * 0.5**6))
    assert begins[id(network.encoder.embed.weight)] == (40, pytest.approx(0.004 * 0.5**7))
    for number, group in enumerate(optimizer.param_groups):
        after = curves[number][group["start"] + 5 :]
        assert all(later <= earlier for earlier, later in pairwise(after))
        assert curves[number][-1] == pytest.approx(0.1 * group["peak"], rel=0.02)


def test_the_patch_embedding_begins_in_stage_all_however_many_last_blocks_are_named(network: TunedNetwork) -> None:
    settings = load_recipe("finetune", ["stages.head=20", "stages.last=20", "last_blocks=50"])
    begins = {parameter: group["start"] for group in network.groups(settings) for parameter in group["params"]}
    assert begins[network.encoder.embed.weight] == 40
    assert begins[network.encoder.blocks[0].attention.qkv.weight] == 20


def test_drop_path_is_a_function_of_the_position_and_off_by_default() -> None:
    settings = load_recipe("finetune", ["drop_path=0.5"])
    whole, half = draw_paths(settings, DEPTH, 7, range(64)), draw_paths(settings, DEPTH, 7, range(32, 64))
    assert torch.equal(whole[..., 32:], half)
    dropped = (whole == 0).float().mean(dim=(1, 2))
    assert dropped[0] == 0
    assert dropped.tolist() == pytest.approx([0.1 * n for n in range(DEPTH)], abs=0.12)
    assert float(whole.mean()) == pytest.approx(1, abs=0.1)  # what is kept makes up for what is not
    frozen = draw_paths(settings, DEPTH, 2, range(64))
    assert (frozen[:4] == 1).all()  # blocks that do not learn are whole
    assert draw_paths(settings, DEPTH, 0, range(4)) is None
    assert Stack.paths is None


def test_a_dropped_sample_passes_a_block_unchanged(source) -> None:
    torch.manual_seed(0)
    encoder = load_encoder(source / "encoder.safetensors")
    block, x = encoder.encoder.blocks[0], torch.randn(3, 5, encoder.dim)
    plain = block(x, None)
    paths = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    mixed = block(x, None, paths)
    assert torch.equal(mixed[0], plain[0])
    assert torch.equal(mixed[1], x[1])
    assert not torch.equal(mixed[2], plain[2])
    assert not torch.equal(mixed[2], x[2])


def test_pools_as_the_frozen_probe_does(planted, source) -> None:
    encoder: PretrainedEncoder = load_encoder(source / "encoder.safetensors")
    one = planted.read("volume0003")
    found = TunedNetwork(encoder, [("binary", 2)]).pool([one])[0].numpy()
    assert np.abs(found - encoder.embed(one, "mean_std_max")).max() < 1e-5


def test_the_loss_is_that_of_the_probes_volume_by_volume() -> None:
    torch.manual_seed(0)
    message, truth = torch.randn(8, 3).log_softmax(dim=1), torch.tensor([0.0, 1, 2, 0, 0, 1, 0, 0])
    weight = torch.tensor([0.5, 1.5, 4.0])
    each = each_loss(message, truth, weight, 0.1)
    expected = networks.loss(message, truth.long(), weight, 0.1)
    assert float(each.sum() / weight[truth.long()].sum()) == pytest.approx(float(expected), rel=1e-6)
    truth[3] = torch.nan
    assert float(each_loss(message, truth, weight, 0.1)[3]) == 0
    wanted = torch.tensor([1.0, float("nan")])
    assert each_loss(torch.tensor([[0.5], [9.0]]), wanted, None, 0.0).tolist() == [0.25, 0.0]


def test_classes_weigh_by_inverse_frequency_and_test_labels_are_not_in_the_loop(planted, source, tmp_path) -> None:
    labels = write_labels(tmp_path / "labels.tsv", mark=[int(number % 4 == 0) for number in range(40)])
    encoder, path = load_encoder(source / "encoder.safetensors"), source / "encoder.safetensors"

    def weights(*overrides: str) -> list[float]:
        settings = load_recipe("finetune", overrides)
        data = prepare_tuning_data(settings, encoder, path, planted, labels, ["mark"], ProbeResult())
        tested = (data.frame["split"] == "test").to_numpy()
        assert np.isnan(data.labels[0].truth[tested]).all()
        assert np.isfinite(data.labels[0].truth[~tested]).all()
        return data.labels[0].weight.tolist()

    assert weights() == pytest.approx([20 / 30, 20 / 10])  # 15 people without, 5 with, of 20
    assert weights("class_weights=false") == [1, 1]


@pytest.mark.parametrize("name", RECIPES.names())
def test_shipped_recipes_are_read_back_as_they_are_written(name: str, tmp_path) -> None:
    settings = load_recipe(name)
    (tmp_path / "again.yaml").write_text(to_yaml(settings))
    assert load_recipe(tmp_path / "again.yaml") == settings
    assert settings.name == name


def test_study_group_is_a_person_at_a_time_by_balanced_accuracy() -> None:
    settings: FinetuneRecipe = load_recipe("study_group")
    assert (settings.targets, settings.level, settings.metric) == (("study_group",), "person", "balanced_accuracy")
    assert settings.class_weights


@pytest.mark.parametrize(
    ("override", "result"),
    [
        ("encoder_rate=1", "encoder_rate: unknown key; did you mean 'encoder_lr'?"),
        ("stages.first=1", "stages.first: unknown key; known here: head, last, all"),
        ("views.flip=1", "views.flip: unknown key; did you mean 'flip_slow'?"),
        ("stage.all=1", "stage: unknown key; did you mean 'stages'?"),
        ("stages={head: 0, last: 0, all: 0}", "every stage has 0 updates"),
        ("metric=accuracy", "metric 'accuracy' is unknown: one of auroc"),
        ("head_lr=yes", "switches"),
        ("batch", "not of the form key=value, such as stages.all=500"),
        ("targets=drusen", "targets: Input should be a valid tuple (found 'drusen')"),
        ("level=scan", "level: Input should be 'volume', 'eye' or 'person'"),
    ],
)
def test_a_recipe_that_is_wrong_is_reported(override: str, result: str) -> None:
    with pytest.raises(RecipeError, match=r"refused|form") as error:
        load_recipe("finetune", [override])
    assert result in str(error.value)


@pytest.mark.parametrize("unit", ["index", "mm"])
def test_a_head_knows_where_a_token_is(planted, unit: str) -> None:
    recipe = small_recipe(model={**TEST_SIZE, "position_unit": unit})
    encoder = PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, "untrained")
    network = TunedNetwork(encoder, [("binary", 2), ("regression", 0)])
    one = encoder.select_tokens(planted.read("volume0003"))
    tokens = network(torch.from_numpy(one.patches[None]), torch.from_numpy(one.positions[None]))
    assert np.allclose(tokens.coordinates[0], grid_coordinates(one.grid_index, one.grid), atol=1e-5)
    elsewhere = TokenBatch(tokens.features, tokens.coordinates.flip(1), tokens.valid)
    for head in network.heads:
        torch.nn.init.normal_(head.linear.weight)
    for here, there in zip(network.head_outputs(tokens), network.head_outputs(elsewhere), strict=True):
        assert not torch.allclose(here, there, atol=1e-4)
    whole = network.predict([planted.read("volume0003")])
    assert torch.allclose(whole[0], network.head_outputs(tokens)[0], atol=1e-5)
    again = TunedNetwork(encoder, [("binary", 2), ("regression", 0)])
    assert torch.equal(again.pooling.query, network.pooling.query)
