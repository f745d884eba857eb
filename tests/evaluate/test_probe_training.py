"""MLP and attentive probe find what linear ones cannot, stop early, and let no target touch another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from octjepa.embed import token_folder
from octjepa.embed.token_folder import TokenFolder
from octjepa.evaluate import probe_training
from octjepa.evaluate.calibration import class_weights
from octjepa.evaluate.features import feature_space, plan_selection
from octjepa.evaluate.linear_knn import fit_linear
from octjepa.evaluate.networks import AttentiveProbe, Outputs, TokenBatch, loss
from octjepa.evaluate.targets import Target
from octjepa.metrics.scores import Task, metric_value
from token_parts import token_part


def target_of(values: np.ndarray, name: str = "t", task: Task = "binary", shares: tuple[int, int] = (60, 20)) -> Target:
    """Split in this order, by per cent."""
    cuts = [0, *(len(values) * np.cumsum(shares) // 100), len(values)]
    rows = {split: np.arange(cuts[i], cuts[i + 1]) for i, split in enumerate(("train", "val", "test"))}
    classes = () if task == "regression" else tuple(str(code) for code in range(int(values.max()) + 1))
    return Target(name, task, rows, {split: values[at] for split, at in rows.items()}, classes, "h", ())


def people(count: int) -> np.ndarray:
    return np.array([f"{number:03d}" for number in range(count)])


def auroc(probed: probe_training.Probed) -> float:
    return float(roc_auc_score(probed.predictions.truth, probed.predictions.scores[:, 1]))


@pytest.fixture(scope="module")
def crossed() -> tuple[np.ndarray, Target]:
    """The class is the sign of a product: no linear model can read it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 6))
    return x, target_of((x[:, 0] * x[:, 1] > 0).astype(np.int64))


@pytest.mark.slow
def test_mlp_reads_what_a_linear_probe_cannot(crossed: tuple[np.ndarray, Target]) -> None:
    x, target = crossed
    space, how = feature_space(x, target), plan_selection(target, people(500), 0)
    assert how.by == "val"
    probed = probe_training.mlp(space, target, how)
    assert auroc(probed) > 0.8
    assert auroc(fit_linear(space, target, how)) < 0.65
    assert probed.setting <= probe_training.EPOCHS


def test_networks_stop_early_where_there_is_nothing_to_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs: list[int] = []
    validate = probe_training.ProbeTask.validate
    monkeypatch.setattr(
        probe_training.ProbeTask,
        "validate",
        lambda task, learners: (epochs.append(len(epochs) + 1), validate(task, learners))[1],
    )
    rng = np.random.default_rng(1)
    target = target_of(rng.integers(0, 2, 300))
    x = rng.normal(size=(300, 20))
    space, how = feature_space(x, target), plan_selection(target, people(300), 0)
    probed = probe_training.mlp(space, target, how)
    assert epochs[-1] == probed.setting + probe_training.PATIENCE < 30
    assert probed.unconverged == 0
    assert 0.3 < auroc(probed) < 0.7


def test_folds_stand_in_for_a_validation_split_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_training, "EPOCHS", 12)
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 2, 120)
    x = rng.normal(size=(120, 4)) + 1.5 * codes[:, None]
    target = target_of(codes, shares=(60, 5))
    how = plan_selection(target, people(120), 0)
    assert how.by == "cv"
    assert auroc(probe_training.mlp(feature_space(x, target), target, how)) > 0.85
    few = target_of(np.array([1] + [0] * 29 + [0, 1] * 5), shares=(75, 0))
    alone = plan_selection(few, people(40), 0)
    assert alone.by == "fixed"
    monkeypatch.setattr(probe_training, "UNWATCHED_EPOCHS", 3)
    assert probe_training.mlp(feature_space(x[:40], few), few, alone).setting == 3


@pytest.mark.parametrize("task", ["multiclass", "ordinal", "regression"])
@pytest.mark.slow
def test_every_task_has_its_outputs(task: Task) -> None:
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=400)
    values = hidden if task == "regression" else np.digitize(hidden, [-0.5, 0.5]).astype(np.int64)
    x = np.stack([hidden, -hidden, *rng.normal(size=(4, 400))], axis=1) + 0.3 * rng.normal(size=(400, 6))
    target = target_of(40 + 7 * values if task == "regression" else values, task=task)
    message = probe_training.mlp(feature_space(x, target), target, plan_selection(target, people(400), 0)).predictions
    assert np.isfinite(message.scores).all()
    if task == "regression":
        assert metric_value("r2", message) > 0.8
    else:
        assert np.allclose(message.scores.sum(axis=1), 1)
        assert metric_value("balanced_accuracy", message) > 0.7
        assert metric_value("quadratic_kappa", message) > 0.6


def test_ordered_thresholds_give_probabilities() -> None:
    outputs = Outputs(3, "ordinal", 4)
    with torch.no_grad():
        outputs.linear.weight[:] = torch.tensor([[5.0, 0, 0]])
        message = outputs(torch.tensor([[-3.0, 0, 0], [3.0, 0, 0]])).exp()
    assert torch.allclose(message.sum(dim=1), torch.ones(2), atol=1e-4)
    assert message.argmax(dim=1).tolist() == [0, 3]


def test_class_weights_and_smoothing_are_in_the_loss() -> None:
    truth = torch.tensor([0, 0, 0, 1])
    message = torch.log_softmax(torch.tensor([[2.0, 0], [1, 0], [0, 1], [0, 3]]), dim=1)
    weights = class_weights(truth.numpy(), 2)
    assert weights.tolist() == [4 / 6, 2.0]
    own = torch.nn.functional.cross_entropy(message, truth, torch.tensor(weights, dtype=torch.float32))
    assert loss(message, truth, torch.tensor(weights).float()) == pytest.approx(own.item())
    half = -(0.95 * message[3, 1] + 0.05 * message[3, 0])
    assert loss(message[3:], truth[3:], torch.ones(2), 0.1) == pytest.approx(half.item())


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenFolder, list[str], np.ndarray]:
    """Tokens [240, 12, 8]: one token of a diseased eye, anywhere, carries the sign."""
    rng = np.random.default_rng(4)
    tokens = rng.normal(size=(240, 12, 8))
    sick = rng.integers(0, 2, 240)
    tokens[np.arange(240), rng.integers(0, 12, 240), 0] += 6.0 * sick
    folder = tmp_path_factory.mktemp("tokens")
    ids = [f"v{number:03d}" for number in range(240)]
    parts = {"a": ids[:100], "b": ids[100:]}
    for name, rows in (("a", slice(100)), ("b", slice(100, None))):
        block = tokens[rows]
        blank = np.random.default_rng(5).normal(size=block.shape)
        token_folder.write_part(folder, name, token_part(block, blank, np.zeros(block.shape[:2])))
    about = {"encoder": "octjepa", "weights": "w", "contract": "c" * 64, "dim": 8, "grid": [1, 3, 4]}
    token_folder.write_index(folder, parts, about)
    return TokenFolder.open(folder), ids, sick


@pytest.mark.slow
def test_attention_finds_the_one_token_and_the_untrained_view_holds_nothing(
    hidden: tuple[TokenFolder, list[str], np.ndarray],
) -> None:
    folder, ids, sick = hidden
    target = target_of(sick)
    how = plan_selection(target, people(240), 0)
    (read,) = probe_training.attentive(folder, "vector", ids, target.indices["train"], [target], [how])
    (blank,) = probe_training.attentive(folder, "untrained", ids, target.indices["train"], [target], [how])
    assert auroc(read) > 0.9
    assert 0.25 < auroc(blank) < 0.75


@pytest.mark.slow
def test_a_target_gets_the_same_whoever_else_is_requested(
    hidden: tuple[TokenFolder, list[str], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_training, "EPOCHS", 3)
    folder, ids, sick = hidden
    one = target_of(sick, "one")
    rows = {split: at[::2] for split, at in one.indices.items()}
    other = Target("two", "binary", rows, {s: 1 - one.values[s][::2] for s in rows}, ("0", "1"), "h", ())
    hows = [plan_selection(target, people(240), 0) for target in (one, other)]
    train = one.indices["train"]
    alone = probe_training.attentive(folder, "vector", ids, train, [other], hows[1:])
    both = probe_training.attentive(folder, "vector", ids, train, [one, other], hows)
    assert (both[1].predictions.scores == alone[0].predictions.scores).all()
    with torch.random.fork_rng():
        torch.manual_seed(99)  # nor does the state of torch's own generator matter
        again = probe_training.attentive(folder, "vector", ids, train, [other], hows[1:])
    assert (again[0].predictions.scores == alone[0].predictions.scores).all()


def test_attention_is_a_share_of_the_tokens_in_any_order_and_of_no_filling() -> None:
    torch.manual_seed(0)
    network = AttentiveProbe(torch.zeros(8), torch.ones(8), "binary", 2).eval()
    features, coordinates, valid = torch.randn(3, 12, 8), torch.rand(3, 12, 3) * 2 - 1, torch.ones(3, 12).bool()
    tokens = TokenBatch(features, coordinates, valid)
    assert torch.allclose(network.pooling.attention(tokens).sum(dim=-1), torch.ones(3, 1, 4))
    flipped = TokenBatch(features.flip(1), coordinates.flip(1), valid)
    assert torch.allclose(network(tokens), network(flipped), atol=1e-6)
    valid[:, 9:] = False
    part = TokenBatch(features[:, :9], coordinates[:, :9], valid[:, :9])
    assert torch.allclose(network(TokenBatch(features, coordinates, valid)), network(part), atol=1e-6)


@pytest.mark.slow
def test_the_position_of_a_token_is_read_where_nothing_else_differs(tmp_path: Path) -> None:
    """Every volume holds the same twelve tokens; in diseased eyes the first one lies in the left half of the grid."""
    rng = np.random.default_rng(6)
    sick, tokens = rng.integers(0, 2, 240), rng.normal(size=(12, 8))
    positions = np.stack([rng.permutation(12) for _ in range(240)])
    for volume, left in enumerate(sick):
        wanted = rng.integers(0, 6) if left else rng.integers(6, 12)
        other = int(np.flatnonzero(positions[volume] == wanted)[0])
        positions[volume, [0, other]] = positions[volume, [other, 0]]
    ids, block = [f"v{number:03d}" for number in range(240)], np.tile(tokens, (240, 1, 1))
    target, found = target_of(sick), {}
    for name, given in (("known", positions), ("unknown", np.zeros_like(positions))):
        (tmp_path / name).mkdir()
        token_folder.write_part(tmp_path / name, "a", token_part(block, block, given))
        about = {"encoder": "e", "weights": "w", "contract": "c" * 64, "dim": 8, "grid": [1, 1, 12]}
        token_folder.write_index(tmp_path / name, {"a": ids}, about)
        folder, how = TokenFolder.open(tmp_path / name), plan_selection(target, people(240), 0)
        (fit,) = probe_training.attentive(folder, "vector", ids, target.indices["train"], [target], [how])
        found[name] = auroc(fit)
    assert found["known"] > 0.95
    assert found["unknown"] == pytest.approx(0.5, abs=0.1)


def test_volumes_of_different_counts_are_filled_up_and_read_whole(tmp_path: Path) -> None:
    counts, rng = np.array([3, 1, 4], np.int32), np.random.default_rng(0)
    features = rng.normal(size=(8, 2)).astype(np.float16)
    positions = np.array([0, 5, 11, 2, 0, 1, 2, 3], np.int32)
    part = {"vector": features, "untrained": -features, "positions": positions, "counts": counts}
    token_folder.write_part(tmp_path, "a", part)
    about = {"encoder": "e", "weights": "w", "contract": "c", "dim": 2, "grid": [1, 3, 4]}
    token_folder.write_index(tmp_path, {"a": ["v0", "v1", "v2"]}, about)
    folder = TokenFolder.open(tmp_path)
    read = folder.read("vector", ["v1", "v0"])
    assert read.features.shape == (2, 4, 2)  # as long as the longest of the folder, whoever is read
    assert read.valid.tolist() == [[True, False, False, False], [True, True, True, False]]
    assert (read.features[1, :3] == features[:3]).all()
    assert np.allclose(read.coordinates[1, 2], [0, 2 / 3, 3 / 4])
    assert not read.features[~read.valid].any()
    assert (folder.features("untrained", "v2") == -features[4:]).all()


def test_test_features_and_labels_reach_no_fit(
    crossed: tuple[np.ndarray, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_training, "EPOCHS", 3)
    x, target = crossed
    how = plan_selection(target, people(500), 0)
    before = probe_training.mlp(feature_space(x, target), target, how)
    values = {**target.values, "test": 1 - target.values["test"]}
    flipped = Target("t", "binary", target.indices, values, target.classes, "h", ())
    assert (
        probe_training.mlp(feature_space(x, flipped), flipped, how).predictions.scores == before.predictions.scores
    ).all()


def test_a_token_folder_that_is_none_or_damaged_is_reported(tmp_path: Path) -> None:
    from octjepa.errors import OctjepaError, UsageError

    with pytest.raises(UsageError, match="not a folder of tokens"):
        TokenFolder.open(tmp_path)
    about = {"encoder": "e", "weights": "w", "contract": "c", "dim": 4, "grid": [1, 1, 3]}
    part = token_part(np.zeros((2, 3, 4)), np.zeros((2, 3, 4)), np.zeros((2, 3)))
    token_folder.write_part(tmp_path, "a", part)
    token_folder.write_index(tmp_path, {"a": ["v0", "v1", "v2"]}, about)
    with pytest.raises(OctjepaError, match=r"a\.counts\.npy holds \(2,\), expected \(3,\)"):
        TokenFolder.open(tmp_path)
    token_folder.write_part(tmp_path, "a", {**part, "counts": np.full(2, 4, np.int32)})
    token_folder.write_index(tmp_path, {"a": ["v0", "v1"]}, about)
    with pytest.raises(OctjepaError, match=r"a\.vector\.npy holds \(6, 4\), expected \(8, 4\)"):
        TokenFolder.open(tmp_path)
    (tmp_path / "a.vector.npy").write_bytes(b"no array")
    with pytest.raises(OctjepaError, match=r"a\.vector\.npy is damaged"):
        TokenFolder.open(tmp_path)
