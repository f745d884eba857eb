from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from octjepa.keys import generator, key

# Computed once with this package; a change here changes the data order, masks and crops of every recorded run.
GOLDEN_KEYS = {
    (0, "order", 0): 516879229434908400,
    (0, "mask", 3, "a1b2c3d4e5f60718"): 1005671333263669890,
    (): 8238016292129134938,
}


@pytest.mark.parametrize(("parts", "value"), GOLDEN_KEYS.items())
def test_keys_have_their_golden_values(parts: tuple[int | str, ...], value: int) -> None:
    assert key(*parts) == value


def test_generator_has_its_golden_values() -> None:
    assert generator(0, "mask", 3, "a1b2").integers(0, 1_000_000, 4).tolist() == [922808, 478333, 662572, 815996]


PIECES = (0, 1, 11, -1, 2**70, "", "0", "1", "11", "-1", "a", "aa", "astr:1", "aint:1", "\x1e", "\n", "é", "e\u0301")


def test_equal_parts_equal_keys_and_other_parts_other_keys() -> None:
    """Of every sequence of up to three pieces."""
    sequences = [parts for count in range(4) for parts in itertools.product(PIECES, repeat=count)]
    keys = [key(*parts) for parts in sequences]
    assert len(set(keys)) == len(sequences)
    assert 0 <= min(keys) < max(keys) < 2**63
    assert keys == [key(*parts) for parts in sequences]


def test_a_number_and_its_text_and_shifted_borders_differ() -> None:
    assert len({key(1), key("1"), key(1, 1), key("1", "1"), key("11"), key("1", 1), key(1, "1")}) == 7


def test_draws_do_not_depend_on_the_order_of_work() -> None:
    samples = [f"sample{i}" for i in range(20)]
    forward = {s: generator(7, "crop", 1, s).random(3) for s in samples}
    np.random.default_rng(0).random(1000)  # draws elsewhere must not matter either
    backward = {s: generator(7, "crop", 1, s).random(3) for s in reversed(samples)}
    for sample in samples:
        np.testing.assert_array_equal(forward[sample], backward[sample])
    assert len({values.tobytes() for values in forward.values()}) == len(samples)


def test_purpose_epoch_and_seed_each_give_another_stream() -> None:
    streams = [generator(*parts).random(2).tobytes() for parts in [(0, "a", 0), (0, "b", 0), (0, "a", 1), (1, "a", 0)]]
    assert len(set(streams)) == 4


def test_another_process_with_another_hash_seed_agrees() -> None:
    code = "from octjepa.keys import key, generator; print(key(1, 'x'), generator(1, 'x').random())"
    message = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "4321"}, capture_output=True, text=True, check=True
    )
    assert message.stdout.split() == [str(key(1, "x")), str(generator(1, "x").random())]


def test_draws_look_uniform_over_samples() -> None:
    first = np.array([generator(0, "flip", 0, f"{i:016x}").random() for i in range(4000)])
    # Standard error of the mean of 4000 uniform draws is 0.0046; five of them.
    assert abs(first.mean() - 0.5) < 0.023
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.08


def test_numpy_integers_are_the_numbers_they_are() -> None:
    assert key(np.int64(3), "a") == key(3, "a")
    with pytest.raises(TypeError):
        key(1.5)  # type: ignore[arg-type]


def test_names_that_are_no_text_have_keys() -> None:
    """A file name with undecodable bytes reaches Python with lone surrogates."""
    assert key("\ud800") != key("\ud801")
