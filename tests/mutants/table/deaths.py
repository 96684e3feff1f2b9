"""Mutants of what is done when somebody dies: checkpoints, lives, standbys, and the coordinator's journal."""

from mutants import Mutant

MOMENT = "checkpoint-moment"
STANDBY = "standby"
GRANTED = "one-shard-life"
TOGETHER = "common-rewind"
JOURNAL = "coordinator-death"
CTRL_C = "ctrl-c"
INTERRUPTED = "interrupted-job"
REPLICAS = "replica-death"
SPLIT = "split-push"

CONSISTENCY, STANDBYS, REVIVAL = (
    "tests/simulated/test_consistency.py",
    "tests/simulated/test_standby.py",
    "tests/simulated/test_revival.py",
)
BY_SEED = f"{CONSISTENCY}::test_a_seed_that_fails_by_a_mistake"
MACHINE = "tests/machines/test_coordinator.py"

INTERRUPTS, AS_IF_NOT = (
    "tests/simulated/test_interrupted.py::test_a_job_that_is_interrupted_leaves_within_two_steps_and_goes_on",
    "tests/simulated/test_interrupted.py::test_a_job_that_was_interrupted_ends_as_if_it_had_not_been",
)
PARTITIONS = "tests/simulated/test_partitions.py"
SPLIT_SWEEP = f"{PARTITIONS}::test_no_fault_loses_or_repeats_a_gradient_of_split_replicas[0]"
SPLIT_ROUNDS = f"{PARTITIONS}::test_rounds_of_split_replicas_are_sgd_on_the_unions"

OWN = "own-minibatches"
UNION = "synchronous-sgd"
ALLOTMENTS = "tests/simulated/test_allotments.py"
PRIVATE = "private-data"
UNEQUAL = f"{ALLOTMENTS}::test_synchronous_replicas_on_unequal_data_are_sgd_on_the_weighted_union"

MUTANTS = [
    Mutant("what-a-dead-replica-held-comes-last", OWN, "core/portions.py",
        "        self._again.extendleft(reversed(held))\n", "        self._again.extend(held)\n",
        ("tests/core/test_portions.py::test_an_allotment_is_dealt_in_order_however_often_its_replica_dies",)),
    Mutant("a-stream-goes-on-beyond-its-end", OWN, "coordination/allotments.py",
        "        if epoch == self._epoch:\n", "        if epoch > self._epoch:\n",
        (f"{ALLOTMENTS}::test_each_stream_is_dealt_to_its_end",), 20, hangs=True),
    Mutant("private-parts-are-cut-anew-in-each-epoch", PRIVATE, "tasks/order.py",
        "            if self._owners is not None:\n", "            if False:\n",
        ("tests/core/test_tasks.py::test_private_parts_are_in_another_order_in_each_epoch_and_of_another_cut_with_another_seed",)),
    Mutant("sorted-parts-are-of-all-labels", PRIVATE, "tasks/order.py",
        "    if settings.data == SORTED:\n", "    if False:\n",
        ("tests/core/test_tasks.py::test_sorted_parts_follow_the_labels",)),
    Mutant("all-are-dealt-the-same-numbers", UNION, "coordination/allotments.py",
        "    return range(index * OWN, index * OWN + count)\n", "    return range(count)\n",
        (UNEQUAL,)),
    Mutant("a-job-waits-for-who-will-not-come", OWN, "coordination/allotments.py",
        "        self._awaited.discard(who)\n", "        pass\n",
        (f"{ALLOTMENTS}::test_what_is_left_to_a_replica_that_never_comes_again_is_told",)),
    Mutant("a-push-counts-when-the-lead-has-made-it", SPLIT, "replica/work.py",
        "{**sent, **parts}", "{**sent}",
        (SPLIT_SWEEP,), seconds=10),
    Mutant("partitions-outlive-each-other", "split-death", "places/supervisor.py",
        ", *self._kill_siblings(life)]", "]",
        (SPLIT_SWEEP,), seconds=10),
    Mutant("partitions-of-one-replica-begin-different-lives", "split-death", "places/supervisor.py",
        "return last + 1 if last", "return life.incarnation + 1 if last",
        ("tests/machines/test_supervisor.py::"
         "test_a_partition_that_dies_again_before_another_of_its_replica_has_ended_begins_the_same_life_as_that",)),
    Mutant("a-partition-comes-again-alone", "split-death", "places/supervisor.py",
        "not self.ending and not self._was_done(life)", "not self.ending",
        ("tests/machines/test_supervisor.py::"
         "test_no_partition_comes_again_where_another_of_its_life_has_ended_in_peace",)),
    Mutant("only-the-lead-of-a-replica-leaves", "split-death", "places/supervisor.py",
        "life.left |= roles.lead_of(life.role) == lead", "life.left |= life.role == lead",
        ("tests/machines/test_supervisor.py::"
         "test_a_replica_that_was_let_go_is_no_death_whichever_of_its_partitions_ends_how",)),
    Mutant("partitions-hold-parameters-of-two-rounds", SPLIT, "replica/siblings.py",
        "AtRound(*now, max(ticks), len(ticks) == 1)", "AtRound(*now, tick, True)",
        (SPLIT_ROUNDS,), seconds=20),
    Mutant("a-partition-that-pushes-clips-by-its-own-norm", SPLIT, "replica/siblings.py",
        "        return whole.norm", "        return norm",
        (f"{PARTITIONS}::test_a_gradient_is_clipped_by_the_norm_of_all_its_partitions",), seconds=20),
    Mutant("what-a-partition-has-lost-nobody-hears-of", SPLIT, "replica/siblings.py",
        "                self._rejoins.append(question)\n", "                pass\n",
        (f"{PARTITIONS}::test_a_shard_that_comes_again_is_found_by_the_partition_that_pushes_to_it[shard 1]",)),
    Mutant("a-ctrl-c-while-a-job-ends-is-forgotten", CTRL_C, "coordination/closing.py",
        "        self._interrupted = reason\n", "",
        (f"{CONSISTENCY}::test_a_ctrl_c_while_the_job_ends_counts_where_all_go_back",
         "tests/simulated/test_allreduce.py::test_a_ctrl_c_while_the_job_ends_counts_where_all_go_back")),
    Mutant("a-replica-hears-nothing-between-two-steps", INTERRUPTED, "replica/downpour.py",
        "        yield from self._look()\n        drained", "        drained",
        (f"{INTERRUPTS}[a push of many steps]",)),
    Mutant("a-round-of-a-job-that-ends-is-smaller", INTERRUPTED, "replica/downpour.py",
        "return bool(self._next.steps) and self._policy.rounds and ends", "return False and ends",
        (f"{AS_IF_NOT}[one replica in rounds]",)),
    Mutant("who-interrupts-a-job-waits-for-a-measure", INTERRUPTED, "coordination/coordinator.py",
        "self.evaluations.pending and self.closing.cause is not Cause.INTERRUPTED", "self.evaluations.pending",
        (f"{MACHINE}::test_a_job_that_is_interrupted_waits_for_no_measure",)),
    Mutant("what-was-given-back-comes-before-what-was-begun", "resumed-job", "core/portions.py",
        "(*held, *self._again)", "(*self._again, *held)",
        ("tests/core/test_portions.py::"
         "test_what_was_begun_comes_before_what_was_given_back_where_its_replica_leaves_or_a_job_goes_on",)),
    Mutant("who-holds-the-parameters-is-killed-before-they-are-kept", INTERRUPTED, "places/supervisor.py",
        "            if self.ending:\n                self._leave", "            if True:\n                self._leave",
        ("tests/machines/test_supervisor.py::"
         "test_an_interruption_is_told_to_whoever_ends_the_job_and_the_second_ends_it",)),
    Mutant("and-also-where-a-standby-could-succeed", STANDBY, "coordination/shard_holders.py",
        "        if job.standbys.can_succeed(role):\n", "        if False:\n",
        (BY_SEED,)),
    Mutant("a-checkpoint-does-not-wait-for-what-is-on-its-way", MOMENT, "coordination/saving.py",
        "is not CheckpointStage.HOLDING or (busy and self._patient):", "is not CheckpointStage.HOLDING:",
        (f"{MACHINE}::test_a_checkpoint_in_rounds_waits_for_those_who_hold_minibatches_but_not_for_ever",)),
    Mutant(
        "a-checkpoints-position-is-of-when-it-is-sealed", MOMENT, "coordination/saving.py",
        "position = msgspec.structs.replace(data.position(), unmeasured=unmeasured)",
        "position = Position(0, 0, (), unmeasured=unmeasured)",
        (f"{MACHINE}::test_a_checkpoints_position_is_of_the_moment_at_which_all_pushes_are_applied_and_an_error_is_recorded",),
    ),
    Mutant("replicas-push-on-while-a-checkpoint-is-made", MOMENT, "replica/downpour.py",
        "        while (self._holding and holds) or (split and",
        "        while (split and",
        (BY_SEED,)),
    Mutant("what-softsync-has-acknowledged-is-not-saved", MOMENT, "server/shard.py",
        "        updates = self._settle(short=True)  # what was acknowledged is in the parameters that are saved\n",
        "        updates: list[Effect] = []\n",
        (f"{CONSISTENCY}::test_what_softsync_has_acknowledged_is_in_every_checkpoint",)),
    Mutant("what-was-forgotten-is-one-less", "shard-death", "core/ledger.py",
        "        return max(0, clock - last)\n", "        return max(0, clock - last - 1)\n",
        (BY_SEED,)),
    Mutant("a-push-is-acknowledged-before-the-standby-has-it", STANDBY, "server/mirror.py",
        "        if self._number == self._confirmed or not effects:\n", "        if True:\n",
        (f"{STANDBYS}::test_nothing_is_acknowledged_that_the_standby_has_not_confirmed",)),
    Mutant("a-floor-is-told-that-the-standby-does-not-know", STANDBY, "server/mirror.py",
        "return self.place is None or floor <= self._floor", "return True",
        (f"{STANDBYS}::test_no_floor_is_told_that_the_standby_has_not_confirmed",)),
    Mutant("a-standby-does-not-note-whose-push-it-was", STANDBY, "server/standby.py",
        "            shard.ledger.note(key)\n            shard.count_push", "            shard.count_push",
        (f"{STANDBYS}::test_a_shard_that_dies_loses_nothing_and_nobody_goes_back",)),
    Mutant("what-is-held-counts-as-taken-for-a-standby", STANDBY, "server/shard.py",
        "            applied[before[:2]] = min(applied[before[:2]], before)\n", "            pass\n",
        (f"{STANDBYS}::test_what_was_held_when_a_standby_came_is_in_a_round_of_its_own",)),
    Mutant("a-standby-steps-at-the-base-rate", STANDBY, "server/standby.py",
        "self.held.apply(sender, event.slot, payload, event.factor)",
        "self.held.apply(sender, event.slot, payload, 1.0)",
        (f"{STANDBYS}::test_a_standby_holds_what_its_shard_holds_bit_for_bit",)),
    Mutant("a-former-life-of-a-shard-is-welcome", GRANTED, "coordination/shards.py",
        "        if place.incarnation < self._registry.granted(role):\n            return False\n", "",
        (f"{MACHINE}::test_a_former_life_of_a_shard_is_told_nothing_once_another_is_granted",)),
    Mutant("a-shard-has-one-life-more", GRANTED, "coordination/registry.py",
        "if not died or incarnation >= self._restarts:", "if not died or incarnation > self._restarts:",
        (BY_SEED,)),
    Mutant("what-members-say-of-the-past-counts", TOGETHER, "coordination/membership.py",
        "        return role not in self._behind\n", "        return True\n",
        (BY_SEED,)),
    Mutant("what-is-due-by-minibatches-does-not-go-back", TOGETHER, "coordination/coordinator.py",
        "        self.evaluations.unmeasured = self.saving.position.unmeasured\n", "",
        ("tests/simulated/test_cadences.py::test_a_job_that_goes_back_measures_by_the_minibatches_of_its_checkpoint",)),
    Mutant("what-a-coordinator-says-of-itself-is-in-its-journal", JOURNAL, "places/processes/running.py",
        "isinstance(word.record, ACCOUNTS) and word.record.role == word.role:", "word.role != roles.COORDINATOR:",
        ("tests/processes/test_restarts.py::"
         "test_a_coordinator_that_has_counted_its_bytes_leaves_out_no_record_in_its_next_life",), seconds=10),
    Mutant("who-comes-back-is-told-everything-again", JOURNAL, "runtime/lasting.py",
        "missed = session.missed(heard)", "missed = session.missed(0)",
        (f"{REVIVAL}::test_the_model_is_that_of_a_calm_run",)),
    Mutant("what-it-had-said-is-not-said-to-who-comes-back", JOURNAL, "runtime/lasting.py",
        "        for message in missed:\n            self._endpoint.send(role, message)\n", "",
        (f"{REVIVAL}::test_a_coordinator_may_die_at_any_message",), hangs=True),
    Mutant("a-death-is-heard-of-twice", REPLICAS, "coordination/registry.py",
        "        if incarnation <= self.gone.get(role, -1):\n"
        "            return False\n"
        "        self.gone[role] = incarnation\n", "        self.gone[role] = incarnation\n",
        (f"{MACHINE}::test_a_death_is_told_of_once_by_whomever",)),
    Mutant("what-a-dead-replica-held-is-not-dealt-again", REPLICAS, "coordination/coordinator.py",
        "        left = self.data.lost(role) if member and self.data else 0\n", "        left = 0\n",
        (f"{MACHINE}::test_a_dead_replicas_minibatches_are_dealt_to_one_that_was_told_to_drain",)),
    Mutant(
        "a-target-stays-reached-though-all-go-back", "common-rewind",
        "coordination/closing.py",
        "if self.cause.outcome not in (Outcome.DONE, Outcome.TARGET):",
        "if self.cause.outcome is not Outcome.DONE:",
        ("tests/simulated/test_consistency.py::test_a_job_that_goes_back_once_its_target_was_reached_trains_until_it_is_reached_again",),
    ),
]  # fmt: skip
