"""Two ranks that each hold half of the model train what one process trains, and their checkpoints are whole."""

from __future__ import annotations

import json

import pytest

from ranks import BEGIN, finish, losses_of, run_alone, start_ranks, weights_of

pytestmark = pytest.mark.slow

SCENE = (
    BEGIN
    + """
dist.init_process_group("gloo")
from torch.distributed.tensor import DTensor
recipe = recipe_of(machine={"micro_batch": 1, "parallel": "sharded"})
store = MemoryStore(recipe.preprocessing)
held = []
honest = loop.take_step
def looking(model, *arguments):
    held.append(sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()))
    held.append(sum(p.numel() for p in model.parameters()))
    return honest(model, *arguments)
loop.take_step = looking
right = loop.accumulate
def stopping(model, batch, recipe, runtime, update, micro):
    if update == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return right(model, batch, recipe, runtime, update, micro)
loop.accumulate = stopping
try:
    pretrain(recipe, store, out / "sharded")
except OctjepaError as error:
    stopped = error.exit_code
loop.accumulate = right
summary = pretrain(recipe, store, out / "sharded", resume=True)
print(json.dumps({"held": held[:2], "stopped": stopped, "summary": summary.to_json()}))
dist.destroy_process_group()
"""
)


def test_each_rank_holds_half_and_together_they_train_the_same_model(tmp_path):
    run_alone(tmp_path / "one")
    ended = finish(start_ranks(SCENE, tmp_path))
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
    outputs = [json.loads(text.splitlines()[-1]) for _, text, _ in ended]
    mine, everything = outputs[0]["held"]
    assert mine <= 0.51 * everything
    assert [one["stopped"] for one in outputs] == [143, 143]
    theirs, ours = weights_of(tmp_path / "one"), weights_of(tmp_path / "sharded")
    assert theirs.keys() == ours.keys()
    worst = max(float((theirs[name] - ours[name]).abs().max()) for name in theirs)
    assert worst < 1e-5
    one, both = losses_of(tmp_path / "one"), losses_of(tmp_path / "sharded")
    assert [update for update, _ in both] == [1, 2, 3, 4, 5, 6]
    assert max(abs(a - b) for (_, a), (_, b) in zip(one, both, strict=True)) < 1e-5
    again = run_alone(tmp_path / "sharded", resume=True)  # whole: one process can take it up
    assert again.to_json() == outputs[0]["summary"]
