"""Who predicts which samples."""

from __future__ import annotations

from distbelief.places.prediction.dealing import SampleDealing


def test_all_that_a_replica_had_is_dealt_again_in_order() -> None:
    dealing = SampleDealing(samples=10, size=3)
    assert [dealing.next_for(0), dealing.next_for(0), dealing.next_for(1)] == [(0, 3), (3, 6), (6, 9)]
    assert dealing.take_done(0) == 3
    assert dealing.next_for(0) == (9, 10)
    dealing.take_end(0)
    assert [dealing.next_for(1), dealing.next_for(1), dealing.next_for(1)] == [(3, 6), (9, 10), None]
    assert [dealing.take_done(1) for _ in range(3)] == [6, 9, 10]
