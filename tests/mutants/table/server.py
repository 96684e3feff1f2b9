"""Mutants of the served strategies: shards, coordinators, consistency, rounds, portions."""

from mutants import Mutant

TABLES = "A machine takes each message from the roles that the tables of the conversations name"
READ = "A shard applies a push only if it covers what it holds"

MUTANTS = [
    Mutant(
        "a-push-that-comes-again-is-applied-again",
        "At each shard a push applies whole or not at all",
        "core/ledger.py",
        "if clock <= last:",
        "if clock < last:",
        ("tests/machines/test_shard.py::test_a_push_that_was_applied_is_acknowledged_again_and_not_applied",),
    ),
    Mutant(
        "partitions-share-one-number-of-pushes", READ, "core/ledger.py",
        "        key = who, partition\n", "        key = who, 0\n",
        ("tests/core/test_portions.py::test_a_push_is_applied_at_most_once_and_in_order_whatever_comes",),
    ),
    Mutant(
        "every-encoding-is-read-as-dense", READ, "server/shard.py",
        "known = event.encoding in pushing.ENCODINGS and event.partition", "known = event.partition",
        ("tests/machines/test_shard.py::test_what_breaks_the_protocol_changes_nothing[encoding]",),
    ),
    Mutant(
        "whatever-a-push-covers-is-applied", READ, "server/shard.py",
        "if not known or event.ranges != here.covers:", "if not known:",
        ("tests/machines/test_shard.py::test_what_breaks_the_protocol_changes_nothing[other ranges]",),
    ),
    Mutant(
        "anybody-may-push-for-any-partition", READ, "server/shard.py",
        " and event.partition == roles.partition_of(sender)\n", "\n",
        ("tests/machines/test_shard.py::test_what_breaks_the_protocol_changes_nothing[partition]",),
    ),
    Mutant(
        "anybody-may-say-anything", TABLES, "server/machine.py",
        "if roles.kind(sender) not in self._heard[event]:", "if not roles.kind(sender):",
        ("tests/machines/test_answers.py::test_a_machine_takes_each_message_from_those_who_say_it_and_from_nobody_else",),
    ),
    Mutant(
        "any-state-may-follow-any", TABLES, "core/conversations/table.py",
        "        known = self._moves.get((before, after))\n", "        known = self._moves.get((before, after), ())\n",
        ("tests/core/test_conversations.py::test_a_move_that_no_table_has_is_a_bug_of_ours",),
    ),
]  # fmt: skip
