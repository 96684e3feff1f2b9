"""Mutants of the served strategies: shards, coordinators, consistency, rounds, portions."""

from mutants import Mutant

TABLES = "message-senders"
READ = "checked-push"

SEVERAL = "several-models"
MODELS = "tests/simulated/test_several_models.py::"

MUTANTS = [
    Mutant("the-step-of-one-model-makes-another-older", SEVERAL, "server/shard.py",
        "return sum(stepped == model for stepped in islice(reversed(self._stepped), since))", "return since",
        (MODELS + "test_one_replica_steps_each_model_as_plain_torch_does",)),
    Mutant("the-first-optimizer-steps-every-model", SEVERAL, "core/settings.py",
        "return self.optimizers[model] if", "return self.optimizers[0] if",
        ("tests/processes/test_two_models.py::test_one_replica_trains_two_models_as_the_plain_script",), seconds=20),
    Mutant("who-comes-takes-part-in-the-middle-of-a-minibatch", SEVERAL, "core/rounds.py",
        "if self._rules and self.models > 1 and who not in self._members:", "if False:",
        (MODELS + "test_who_comes_to_rounds_takes_part_when_a_minibatch_begins",)),
    Mutant("a-minibatch-is-done-with-its-first-push", "several-models", "replica/downpour.py",
        "covered = (self._next.covered, self._next.samples) if single else (0, 0)",
        "covered = (self._next.covered, self._next.samples) if single else (steps, steps * self._next.samples)",
        (MODELS + "test_a_minibatch_is_done_when_all_of_its_pushes_are",)),
    Mutant("a-checkpoint-is-made-in-the-middle-of-a-minibatch", "several-models", "replica/downpour.py",
        "if self._hold is not None and not self._pushes.waiting and not self._mid_minibatch:",
        "if self._hold is not None and not self._pushes.waiting:",
        (MODELS + "test_whatever_the_network_and_whoever_dies_the_job_ends_with_all_of_its_steps",), seconds=20),
    Mutant("orders-that-differ-are-one-round", SEVERAL, "core/rounds.py",
        "if tick == self._decided and self._turns[other] != (model, opens):", "if False:",
        (MODELS + "test_in_rounds_replicas_that_step_in_different_orders_are_refused",), hangs=True),
    Mutant("a-push-that-comes-again-is-applied-again", "shard-push",
        "core/ledger.py",
        "if clock <= last:", "if clock < last:",
        ("tests/machines/test_shard.py::test_a_push_that_was_applied_is_acknowledged_again_and_not_applied",)),
    Mutant("partitions-share-one-number-of-pushes", READ, "core/ledger.py",
        "        key = who, partition\n", "        key = who, 0\n",
        ("tests/core/test_portions.py::test_a_push_is_applied_at_most_once_and_in_order_whatever_comes",)),
    Mutant("anybody-may-push-for-any-partition", READ, "server/shard.py",
        "        if event.partition != roles.partition_of(sender):\n", "        if False:\n",
        ("tests/machines/test_shard.py::test_what_breaks_the_protocol_changes_nothing",)),
    Mutant(
        "anybody-may-say-anything", TABLES, "server/machine.py",
        "if roles.kind(sender) not in self._heard[event]:", "if not roles.kind(sender):",
        ("tests/machines/test_answers.py::test_a_machine_takes_each_message_from_those_who_say_it_and_from_nobody_else",),
    ),
    Mutant("any-state-may-follow-any", TABLES, "core/conversations/table.py",
        "if before is not after and (before, after) not in self._moves:", "if before is not after and not self._moves:",
        ("tests/core/test_conversations.py::test_a_move_that_no_table_has_is_a_bug_of_ours",)),
]  # fmt: skip
