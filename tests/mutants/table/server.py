"""Mutants of the served strategies: shards, coordinators, consistency, rounds, portions."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "a-push-that-comes-again-is-applied-again",
        "At each shard a push applies whole or not at all",
        "core/ledger.py",
        "if clock <= last:",
        "if clock < last:",
        ("tests/machines/test_shard.py::test_a_push_that_was_applied_is_acknowledged_again_and_not_applied",),
    ),
]
