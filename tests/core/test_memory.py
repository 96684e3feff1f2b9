"""What a machine holds and was told is kept whole: the memory as data, and the journal that it stands in."""

from __future__ import annotations

import io
from collections import deque
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.core.conversations.checkpointing import Go
from distbelief.core.events import DoubtOver, HoldOver, Lost, Saved, Woke
from distbelief.core.messages import Address, Version
from distbelief.core.records import Cause
from distbelief.errors import LocalProtocolError, RemoteProtocolError
from distbelief.record import journal
from distbelief.record.journal import Journal, JournalEntry
from distbelief.runtime.lasting import Session, recall, remember


class Part:
    def __init__(self, held: Any) -> None:
        self.held = held


class Whole:
    def __init__(self) -> None:
        self.part = Part(0)
        self.shared = self.part
        self.later: Part | None = None


class Unknown(NamedTuple):
    value: int


KINDS: dict[str, type] = {kind.__name__: kind for kind in (Part, Whole, Address, Version, Cause)}
plain = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
keys = st.text() | st.integers(-(2**63), 2**63 - 1) | st.tuples(st.text(), st.integers(0, 9))
held = st.recursive(
    plain | st.sampled_from(Cause) | st.builds(Address, st.text(), st.integers(0, 9)),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(keys, inner)
        | st.frozensets(keys).map(set)
    ),
    max_leaves=12,
)


@given(held)
def test_whatever_plain_parts_hold_comes_back_the_same(value: Any) -> None:
    back = recall(remember(value, KINDS), KINDS)
    assert back == value
    assert type(back) is type(value)


def test_a_part_that_two_share_stays_shared_and_one_that_came_later_is_made() -> None:
    whole, other = Whole(), Whole()
    whole.part.held, whole.later = 7, Part({("a", 1): deque([1])})
    recall(remember(whole, KINDS), KINDS, other)
    assert other.part is other.shared
    assert other.part.held == 7
    assert other.later.held == {("a", 1): deque([1])}


@pytest.mark.parametrize("value", [Unknown(1), object(), (i for i in range(3)), Part(Unknown(1)), {1: len}])
def test_what_cannot_be_remembered_is_refused_and_not_forgotten(value: object) -> None:
    with pytest.raises(LocalProtocolError, match="cannot be stored"):
        remember(value, KINDS)


def opened(files: tuple[io.BytesIO, io.BytesIO]) -> Journal:
    return Journal(*(io.BytesIO(file.getvalue()) for file in files))


EVENTS = (Go(), Lost("\0" * 40, 3), Saved(2, "", "/run/2"), Woke(HoldOver(3)))


def written(memory: bytes) -> tuple[io.BytesIO, io.BytesIO]:
    files = io.BytesIO(), io.BytesIO()
    notes = Journal(*files)
    notes.note("replica 9", 1, Go())
    if memory:
        notes.begin(memory)
    for i, event in enumerate(EVENTS):
        notes.note(f"replica {i}", i, event)
    return files


def test_a_journal_holds_what_was_told_since_it_was_begun() -> None:
    told = [JournalEntry(f"replica {i}", i, event) for i, event in enumerate(EVENTS)]
    assert list(opened(written(b"")).entries()) == [JournalEntry("replica 9", 1, Go()), *told]
    begun = opened(written(b"memory"))
    assert (begun.memory, list(begun.entries())) == (b"memory", told)


def test_a_writer_may_die_at_any_byte_and_the_next_goes_on_after_what_is_whole() -> None:
    files = written(b"memory")
    newest = files[0]  # begun for the second time
    whole = newest.getvalue()
    lengths = set()
    for size in range(len(whole) + 1):
        kept = io.BytesIO(whole[:size]), io.BytesIO(files[1].getvalue())
        again = Journal(*kept)
        entries = list(again.entries())
        if again.memory:
            assert [entry.event for entry in entries] == list(EVENTS[: len(entries)])
            lengths.add(len(entries))
        else:
            assert entries == [JournalEntry("replica 9", 1, Go())], "the journal before is whole"
        again.note("clock", -1, Woke(DoubtOver("shard 1", 2)))
        assert list(Journal(*kept).entries()) == [*entries, JournalEntry("clock", -1, Woke(DoubtOver("shard 1", 2)))]
    assert lengths == set(range(len(EVENTS) + 1))


def test_a_long_journal_is_to_be_begun_anew_and_a_full_one_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LONG", 200)
    monkeypatch.setattr(journal, "LIMIT", 2000)
    files = io.BytesIO(), io.BytesIO()
    notes = Journal(*files)
    assert not notes.long
    while not notes.long:
        notes.note("replica 0", 0, Go())
    notes.begin(b"m" * 300)
    assert not notes.long
    for _ in range(1000):
        notes.note("replica 0", 0, Go())
    assert max(len(file.getvalue()) for file in files) < 2100


def test_a_session_tells_again_what_was_not_heard_and_no_more_than_it_keeps() -> None:
    session = Session(kept=3)
    for _ in range(5):
        session.say(Go())
    assert len(session.missed(2)) == 3
    assert session.missed(5) == []
    for heard in (1, 6, -1):
        with pytest.raises(
            RemoteProtocolError, match=f"{heard} messages are said to have arrived, of 5; the last 3 are kept"
        ):
            session.missed(heard)
