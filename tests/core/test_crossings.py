"""What crosses between the partitions of a split replica in shared memory: both ends here, on one piece of memory."""

from __future__ import annotations

import torch

from distbelief.fabric.crossings import Crossings, segment_bytes

SLOTS = (48, 48)
SHAPE = (3, 4)


def partitions(count: int = 2) -> list[Crossings]:
    memory = torch.zeros(segment_bytes(count, SLOTS), dtype=torch.uint8)
    made = [Crossings(memory, partition, count, SLOTS) for partition in range(count)]
    for one in made:
        one.begin(0)
    return made


def begin(step: int, *those: Crossings) -> None:
    for one in those:
        one.begin(step)


def take(partition: Crossings, slot: int = 0) -> torch.Tensor | None:
    return partition.take(slot, torch.float32, SHAPE)


def value(number: float) -> torch.Tensor:
    return torch.arange(12.0).reshape(SHAPE) + number


def test_what_is_given_is_taken_with_its_dtype_and_sides() -> None:
    first, second = partitions()
    for step in range(1, 6):
        begin(step, first, second)
        assert first.give(0, 1, value(step))
        assert first.give(1, 1, torch.tensor([step, 7], dtype=torch.int32))
        taken, other = take(second), second.take(1, torch.int32, (2,))
        assert taken is not None
        assert torch.equal(taken, value(step))
        assert other.tolist() == [step, 7]


def test_nothing_is_taken_before_it_is_given_in_this_step() -> None:
    first, second = partitions()
    begin(1, first, second)
    assert first.give(0, 1, value(1))
    for step in (2, 3):
        begin(step, second)
        assert take(second) is None
    begin(3, first)
    assert first.give(0, 1, value(3))
    assert torch.equal(take(second), value(3))  # type: ignore[arg-type]  # it is there


def test_what_was_taken_stays_until_the_step_after_the_next_begins() -> None:
    first, second = partitions()
    begin(1, first, second)
    first.give(0, 1, value(1))
    held = take(second)
    first.begin(2)
    assert first.give(0, 1, value(2))  # the other is still in step 1, and reads the first
    first.begin(3)
    assert not first.give(0, 1, value(3))
    assert held is not None
    assert torch.equal(held, value(1))
    second.begin(2)
    assert first.give(0, 1, value(3))
    assert torch.equal(held, value(3))  # it may be written over now


def test_a_later_life_takes_nothing_of_one_before() -> None:
    first, second = partitions()
    begin(1, first, second)
    first.give(0, 1, value(1))
    later = 1 << 34
    second.begin(later)
    second.begin(later + 1)
    assert take(second) is None
    first.begin(later)
    first.begin(later + 1)
    assert first.give(0, 1, value(5))
    assert torch.equal(take(second), value(5))  # type: ignore[arg-type]  # it is there


def test_who_is_in_a_later_life_writes_nothing_over_what_another_reads_of_one_before() -> None:
    first, second = partitions()
    begin(1, first, second)
    first.begin(1 << 34)
    first.begin((1 << 34) + 1)
    assert not first.give(0, 1, value(9))


def test_who_looks_in_vain_sleeps_and_is_woken_by_what_it_waits_for() -> None:
    first, second = partitions()
    begin(1, first, second)
    assert not first.sleeps(1)
    assert take(second) is None
    assert first.sleeps(1)
    assert not second.sleeps(0)
    first.give(0, 1, value(1))
    assert take(second) is not None
    assert not first.sleeps(1)


def test_a_step_that_begins_wakes_whoever_waits_for_it_and_nobody_else() -> None:
    first, second, _ = partitions(3)
    first.begin(1)
    first.begin(2)
    assert not first.give(0, 1, value(2))
    assert second.begin(1) == [0]
    assert first.give(0, 1, value(2))
    assert second.begin(2) == []


def test_values_that_are_taken_do_not_share_the_counter_of_changes_in_place() -> None:
    first, second = partitions()
    for step in (1, 2):
        begin(step, first, second)
        first.give(0, 1, value(step))
    weight = torch.ones(4, requires_grad=True)
    taken = take(second)
    loss = (taken.detach().requires_grad_() * weight).sum()
    second.give(1, 0, torch.zeros(2))  # autograd would refuse to go back if this counted as a change of what it keeps
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, value(2).sum(0))


def test_a_partition_says_which_step_it_has_ended() -> None:
    memory = torch.zeros(segment_bytes(2, [8]), dtype=torch.uint8)
    one, other = (Crossings(memory, partition, 2, [8]) for partition in range(2))
    for step in (1, 2):
        one.begin(step), other.begin(step)
        assert not other.ended(0)
        assert other.take(0, torch.float32, (2,)) is None  # and sleeps
        assert one.end() == [1]
        assert other.ended(0)
        assert not one.ended(1)
