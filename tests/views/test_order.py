"""The order of the stream: exact counts per domain and volume, and nothing to remember between positions."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from octjepa.errors import OctjepaError
from octjepa.views.loader import TrainingDataset, select_volumes, training_batches
from octjepa.views.order import VolumeOrder, quotas
from octjepa.volume import CanonicalVolume
from synthetic import MemoryStore, small_recipe

SIZES = {"cirrus": 60, "maestro": 30, "triton": 9, "plex": 1}
DOMAINS = {f"{name}-{number}": name for name, size in SIZES.items() for number in range(size)}
IDS = sorted(DOMAINS)


def epoch(order: VolumeOrder, number: int) -> list[tuple[int, str]]:
    return [order.volume_at(position) for position in range(number * len(IDS), (number + 1) * len(IDS))]


@pytest.mark.parametrize(
    ("power", "expected"),
    [
        (1.0, SIZES),
        (0.0, {"cirrus": 25, "maestro": 25, "triton": 25, "plex": 25}),
        (0.5, {"cirrus": 44, "maestro": 31, "triton": 18, "plex": 7}),  # 100 in proportion to 7.7, 5.5, 3.0, 1.0
    ],
)
def test_draws_follow_the_power_of_the_size(power: float, expected: dict[str, int]) -> None:
    found = quotas(SIZES, power)
    assert sum(found.values()) == 100
    assert all(abs(found[name] - expected[name]) <= 1 for name in SIZES), found
    if power in (0.0, 1.0):
        assert found == expected


def test_no_domain_starves() -> None:
    assert quotas({"large": 997, "one": 1, "two": 2}, 1.0) == {"large": 997, "one": 1, "two": 2}
    assert quotas({"a": 1, "b": 1, "c": 1}, 0.0) == {"a": 1, "b": 1, "c": 1}
    many = {f"d{number}": 1 for number in range(50)} | {"large": 10_000}
    assert min(quotas(many, 1.0).values()) == 1


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_every_epoch_holds_each_domain_as_often_as_its_quota(power: float) -> None:
    order = VolumeOrder(IDS, 3, DOMAINS, power)
    for number in (0, 1, 7):
        drawn = Counter(DOMAINS[volume_id] for _, volume_id in epoch(order, number))
        assert drawn == order.draws_per_epoch


def test_within_a_domain_nothing_comes_again_before_everything_came() -> None:
    order = VolumeOrder(IDS, 3, DOMAINS)  # 25 draws of each an epoch: cirrus needs 2.4 epochs to come round
    seen: Counter[str] = Counter()
    for number in range(12):
        seen.update(volume_id for _, volume_id in epoch(order, number))
        for name, size in SIZES.items():
            counts = [seen[f"{name}-{member}"] for member in range(size)]
            assert max(counts) - min(counts) <= 1
            assert sum(counts) == 25 * (number + 1)
    assert seen["plex-0"] == 300


def test_a_volume_never_has_the_same_visit_twice() -> None:
    """The visit keys the views: the one volume of a small domain must not come 25 times an epoch with one view."""
    order = VolumeOrder(IDS, 3, DOMAINS)
    positions = [location for number in range(6) for location in epoch(order, number)]
    assert len(set(positions)) == len(positions)
    visits = sorted(visit for visit, volume_id in positions if volume_id == "triton-4")
    assert visits == list(range(len(visits)))


def test_a_position_is_a_function_of_the_seed_and_the_position() -> None:
    walked = [VolumeOrder(IDS, 3, DOMAINS).volume_at(position) for position in range(400)]
    order = VolumeOrder(IDS, 3, DOMAINS)
    assert [order.volume_at(position) for position in reversed(range(400))] == walked[::-1]
    assert [VolumeOrder(IDS, 4, DOMAINS).volume_at(position) for position in range(400)] != walked


def test_without_domains_an_epoch_is_each_volume_once_and_its_visit_the_epoch() -> None:
    order = VolumeOrder(IDS, 3)
    for number in (0, 5):
        assert sorted(epoch(order, number)) == [(number, volume_id) for volume_id in IDS]
    assert order.draws_per_epoch == {"all": 100}


def test_a_balanced_stream_resumes_anywhere_and_needs_its_domains() -> None:
    recipe = small_recipe(data={"balance": "device_and_site"}, train={"max_updates": 9})
    store = MemoryStore(recipe.preprocessing)
    store.table.loc[:7, "device"] = "topcon_triton"
    chosen = select_volumes(store, recipe, "train")
    stream = TrainingDataset(store, recipe, chosen.volume_ids, chosen.domains)
    assert stream.order.draws_per_epoch == {name: 3 for name in set(chosen.domains.values())}
    whole = [batch.volume_ids for batch in training_batches(stream, 0, 9, 0)]
    again = TrainingDataset(store, recipe, chosen.volume_ids, chosen.domains)
    assert [batch.volume_ids for batch in training_batches(again, 5, 9, 2)] == whole[5:]
    drawn = Counter(chosen.domains[volume_id] for ids in whole for volume_id in ids)
    assert set(drawn.values()) == {9}  # 36 draws of 4 domains
    with pytest.raises(ValueError, match="needs the domains"):
        TrainingDataset(store, recipe, chosen.volume_ids)


@pytest.mark.parametrize("reason", ["unreadable", "excluded"])
def test_replacements_never_repeat_a_sample(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing)
    stream = TrainingDataset(store, recipe, sorted(store.volumes))
    monkeypatch.setattr(stream, "make", lambda volume, recipe, visit: (visit, volume.volume_id))
    lost = {stream.volume_at(position)[1] for position in (0, 1, 6)}
    if reason == "excluded":
        stream.exclude(lost)
    else:
        for volume_id in lost:
            del store.volumes[volume_id]
        monkeypatch.setattr(store, "read", partial(_read_or_raise, store))
    samples = [stream[position].sample for position in range(60)]
    assert not lost & {volume_id for _, volume_id in samples}
    assert len(set(samples)) == 60  # equal visits of a volume have equal crops, flips and masks
    assert [stream[position].sample for position in reversed(range(60))] == samples[::-1]
    if reason == "excluded":
        assert [stream.volume_at(position) for position in range(60)] == samples


def _read_or_raise(store: MemoryStore, volume_id: str, halves: bool = False) -> CanonicalVolume:
    if volume_id not in store.volumes:
        raise OctjepaError(f"{volume_id} is absent")
    return store.volumes[volume_id]
