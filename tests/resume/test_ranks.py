"""Two processes are one run: the same weights as one, one writer, and every fault of one rank is met by both alike."""

from __future__ import annotations

import json
import signal
import time

import pytest
import torch

from octjepa.checkpoint import folder
from octjepa.files import read_json_lines
from ranks import BEGIN, SIXTEEN, assert_same, finish, losses_of, recipe_of, run_alone, start_ranks, weights_of

pytestmark = pytest.mark.slow

SCENES = (
    BEGIN
    + """
import time
dist.init_process_group("gloo")
store = lambda recipe: MemoryStore(recipe.preprocessing)
told = {}

# together, from the first update to the last
recipe = recipe_of()
told["whole"] = pretrain(recipe, store(recipe), out / "two").to_json()

# in parts: one process before (made by the test), two now, one after
right = loop.accumulate
def stopping(model, batch, recipe, runtime, update, micro):
    if update == 3 and rank == 1:  # one rank alone is told to stop
        os.kill(os.getpid(), signal.SIGTERM)
    return right(model, batch, recipe, runtime, update, micro)
loop.accumulate = stopping
try:
    pretrain(recipe, store(recipe), out / "parts", resume=True)
except OctjepaError as error:
    told["stopped"] = [error.exit_code, str(error)]

# one rank's gradient is not finite
def bad(model, batch, recipe, runtime, update, micro):
    def spoil(gradient):
        return gradient * float("nan") if update == 2 and rank == 1 else gradient
    handle = next(model.predictor.parameters()).register_hook(spoil)
    figures = right(model, batch, recipe, runtime, update, micro)
    handle.remove()
    return figures
loop.accumulate = bad
told["nan"] = pretrain(recipe, store(recipe), out / "nan").to_json()

# one rank runs out of memory once
def full(model, batch, recipe, runtime, update, micro):
    if update == 2 and rank == 1 and micro == 2:
        right(model, batch, recipe, runtime, update, micro)
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory")
    return right(model, batch, recipe, runtime, update, micro)
loop.accumulate = full
told["memory"] = pretrain(recipe, store(recipe), out / "memory").to_json()
loop.accumulate = right

# one rank runs out of memory at a place that `hook(model, spill)` chooses
def starved(hook):
    def accumulate(model, batch, recipe, runtime, update, micro):
        def spill(*_):
            if update == 2 and rank == 1 and micro == 2:
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory")
        handle = hook(model, spill)
        try:
            return right(model, batch, recipe, runtime, update, micro)
        finally:
            handle.remove()
    return accumulate

# in the middle of its backward pass, when the ranks already add gradients
loop.accumulate = starved(lambda model, spill: model.context_encoder.embed.weight.register_hook(spill))
told["memory_within"] = pretrain(recipe, store(recipe), out / "memory_within").to_json()
# before its backward pass, while the other sends its gradients
loop.accumulate = starved(lambda model, spill: model.predictor.register_forward_pre_hook(spill))
told["memory_before"] = pretrain(recipe, store(recipe), out / "memory_before").to_json()
several = recipe_of(train=SIXTEEN)  # there in the first of four micro-batches
told["memory_accumulated"] = pretrain(several, store(several), out / "memory_accumulated").to_json()
loop.accumulate = right

# each rank takes its share in four micro-batches
several = recipe_of(train=SIXTEEN)
pretrain(several, store(several), out / "accumulated")

# a volume cannot be read, by whichever rank meets it
lossy = store(recipe)
read = lossy.read
def sometimes(volume_id, halves=False):
    if volume_id == "volume0003":
        raise OSError("input/output error")
    return read(volume_id)
lossy.read = sometimes
told["unread"] = pretrain(recipe, lossy, out / "unread").to_json()

# the machine of one rank refuses
from octjepa.store.storage import ResourceError
from octjepa.views import loader
loader._WAITS_SECONDS = ()
refusing = store(recipe)
asked = []
honest_read = refusing.read
def refuses(volume_id, halves=False):
    asked.append(volume_id)
    if rank == 1 and len(asked) > 14:  # eight for the monitor, two an update
        raise ResourceError(f"{volume_id} cannot be read: Too many open files")
    return honest_read(volume_id)
refusing.read = refuses
try:
    pretrain(recipe, refusing, out / "refused_read")
except OctjepaError as error:
    told["refusing"] = [error.exit_code, str(error)]
told["refused_read"] = pretrain(recipe, store(recipe), out / "refused_read", resume=True).to_json()

# rank 0 takes long over the checkpoint of a stopped run
honest_save = checkpointing.state.save
def slow(*arguments):
    time.sleep(1)
    return honest_save(*arguments)
checkpointing.state.save, loop.accumulate = slow, stopping
try:
    pretrain(recipe, store(recipe), out / "slow")
except OctjepaError as error:
    told["slow"] = sorted(path.name for path in (out / "slow" / "checkpoints").glob("step-*"))
checkpointing.state.save, loop.accumulate = honest_save, right

# a rank has another copy of the store
other = MemoryStore(recipe.preprocessing, train=12 + 2 * rank, val=8 - 2 * rank)
try:
    pretrain(recipe, other, out / "copies")
except OctjepaError as error:
    told["copies"] = [error.exit_code, str(error)]

# the hosts have different commits
from octjepa.train import setup
ours = setup.code_hash
setup.code_hash = lambda: f"{rank}" + ours()
try:
    pretrain(recipe, store(recipe), out / "other")
except OctjepaError as error:
    told["other"] = [error.exit_code, str(error)]
setup.code_hash = ours

# rank 0 refuses: the folder holds a run
try:
    pretrain(recipe, store(recipe), out / "two")
except OctjepaError as error:
    told["refused"] = [error.exit_code, str(error)]
print(json.dumps(told))
dist.destroy_process_group()
"""
)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """(folder of runs, what each rank told, stderr of each)."""
    out = tmp_path_factory.mktemp("ranks")
    run_alone(out / "one")
    run_alone(out / "one_of_sixteen", train=SIXTEEN)
    stopped_at(2, out / "parts")
    ended = finish(start_ranks(SCENES, out))
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
    return out, [json.loads(text.splitlines()[-1]) for _, text, _ in ended], [text for _, _, text in ended]


def stopped_at(update, out):
    """A run of one process that was told to stop, and stopped after `update`."""
    import os

    from octjepa.distributed.signals import Interrupted
    from octjepa.train import loop

    honest = loop.accumulate

    def stopping(model, batch, recipe, runtime, now, micro):
        if now == update - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(model, batch, recipe, runtime, now, micro)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "accumulate", stopping)
        with pytest.raises(Interrupted):
            run_alone(out)


def test_two_processes_train_the_weights_of_one_to_the_bit(scenes):
    out, outputs, _ = scenes
    assert_same(weights_of(out / "one"), weights_of(out / "two"))
    assert losses_of(out / "one") == losses_of(out / "two")
    assert outputs[0]["whole"] == outputs[1]["whole"]
    assert outputs[0]["whole"]["loss"] > 0


def test_one_of_them_writes(scenes):
    out, _, _ = scenes
    lines = [line["update"] for line in read_json_lines(out / "two" / "metrics.jsonl") if "train/loss" in line]
    assert lines == [1, 2, 3, 4, 5, 6]
    assert json.loads((out / "two" / "run.json").read_text())["devices"]["processes"] == 2


def test_a_signal_to_one_rank_stops_both_with_a_checkpoint_and_one_process_can_go_on(scenes):
    out, outputs, _ = scenes
    assert [one["stopped"][0] for one in outputs] == [143, 143]
    assert "stopped after update 4 of 6; its checkpoint is written" in outputs[0]["stopped"][1]
    summary = run_alone(out / "parts", resume=True)  # one, two, one again
    assert summary.updates == 6
    assert_same(weights_of(out / "one"), weights_of(out / "parts"))
    assert losses_of(out / "one") == losses_of(out / "parts")


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_both(scenes):
    out, outputs, _ = scenes
    assert [one["nan"]["skipped_updates"] for one in outputs] == [1, 1]
    skipped = [line for line in read_json_lines(out / "nan" / "metrics.jsonl") if "skipped" in line]
    assert [line["update"] for line in skipped] == [3]
    assert len(skipped[0]["skipped"]) == 4
    assert_same(weights_of(out / "one", 2), weights_of(out / "nan", 2))
    after, before = weights_of(out / "nan"), weights_of(out / "one")
    assert all(torch.isfinite(value).all() for value in after.values())
    step = "optimiser.safetensors/step/context_encoder.embed.weight"
    assert (after[step], before[step]) == (5, 6)


def test_ranks_that_accumulate_micro_batches_train_the_weights_of_one_to_the_bit(scenes):
    out, _, _ = scenes
    assert_same(weights_of(out / "one_of_sixteen"), weights_of(out / "accumulated"))


def test_memory_that_runs_out_in_an_early_micro_batch_makes_both_take_fewer_volumes_at_once(scenes):
    out, outputs, _ = scenes
    assert [one["memory_accumulated"]["skipped_updates"] for one in outputs] == [0, 0]
    mine, theirs = weights_of(out / "memory_accumulated"), weights_of(out / "one_of_sixteen")
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-5


@pytest.mark.parametrize("moment", ["memory", "memory_before", "memory_within"])
def test_memory_that_runs_out_on_one_rank_makes_both_take_fewer_volumes_at_once(scenes, moment):
    out, outputs, errors = scenes
    assert all(text.count("every rank now takes 1 volumes at once") == 4 for text in errors)
    assert [one[moment]["skipped_updates"] for one in outputs] == [0, 0]
    mine, theirs = weights_of(out / moment), weights_of(out / "one")
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-5


def test_a_volume_that_cannot_be_read_is_quarantined_and_another_stands_in(scenes):
    out, outputs, _ = scenes
    lines = read_json_lines(out / "unread" / "metrics.jsonl")
    assert {name for line in lines for name in line.get("unread", ())} == {"volume0003"}
    ledger = [json.loads(line) for line in (out / "unread" / "quarantine.jsonl").read_text().splitlines()]
    assert [(row["file"], row["stage"], row["reason"]) for row in ledger] == [
        ("volume0003", "train", "unreadable_file")
    ]
    assert outputs[0]["unread"] == outputs[1]["unread"]


def test_a_machine_that_refuses_one_rank_ends_both_with_a_checkpoint_and_no_volume_is_blamed(scenes):
    out, outputs, _ = scenes
    assert outputs[0]["refusing"] == outputs[1]["refusing"]
    code, output = outputs[0]["refusing"]
    assert code == 1
    assert "cannot be read: Too many open files; stopped after update 3 of 6; its checkpoint is written" in output
    assert (out / "refused_read" / "quarantine.jsonl").read_text() == ""
    assert_same(weights_of(out / "one"), weights_of(out / "refused_read"))
    assert losses_of(out / "one") == losses_of(out / "refused_read")


def test_no_rank_ends_before_the_checkpoint_of_a_stopped_run_is_written(scenes):
    """torchrun kills the others half a minute after one has ended."""
    _, outputs, _ = scenes
    assert [one["slow"] for one in outputs] == [["step-00000002", "step-00000004"]] * 2


def test_ranks_that_see_other_volumes_are_refused(scenes):
    out, outputs, _ = scenes
    assert outputs[0]["copies"] == outputs[1]["copies"]
    assert outputs[0]["copies"][0] == 2
    assert "do not run the same" in outputs[0]["copies"][1]
    assert not (out / "copies").exists()


def test_what_rank_0_refuses_ends_all_with_its_code(scenes):
    _, outputs, _ = scenes
    assert [one["refused"][0] for one in outputs] == [2, 2]
    assert "already holds a run" in outputs[0]["refused"][1]
    assert outputs[1]["refused"][1].startswith("rank 0: ")


def test_ranks_with_different_code_are_refused_before_anything_is_written(scenes):
    out, outputs, _ = scenes
    assert [one["other"][0] for one in outputs] == [2, 2]
    assert outputs[0]["other"] == outputs[1]["other"]
    assert "the processes do not run the same: rank 0 has code 0" in outputs[0]["other"][1]
    assert ", rank 1 code 1" in outputs[0]["other"][1]
    assert not (out / "other").exists()


DYING = (
    BEGIN
    + """
recipe = recipe_of(200)
honest = loop.learning_rate
def dying(update, total, train):
    if update == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return honest(update, total, train)
loop.learning_rate = dying
try:
    pretrain(recipe, MemoryStore(recipe.preprocessing), out)
except OctjepaError as error:
    print(error)
    sys.exit(error.exit_code)
"""
)


def test_a_rank_that_is_killed_ends_the_other_with_a_message_not_a_hang(tmp_path):
    for attempt in ("first", "second"):
        started, run = time.monotonic(), tmp_path / attempt
        (code, output, outputs), (killed, _, _) = finish(start_ranks(DYING, run))
        assert killed == -signal.SIGKILL
        # About once in a hundred times, on a loaded machine, the process aborts below Python while the broken
        # connection is taken down. A launcher sees that it failed all the same; twice in a row would be ours.
        if code != -signal.SIGABRT:
            break
    assert code == 1, outputs
    assert "rank 0 lost the others" in output
    assert "--resume" in output
    assert time.monotonic() - started < 240
    recipe = recipe_of(200)
    assert folder.list_checkpoints(run / "checkpoints")[-1].name == "step-00000002"
    assert recipe.checkpoint.every_updates == 2
