"""Mutants of what is applied, when, and at which rate: slices, policies, rounds, portions."""

from mutants import Mutant

SEQUENTIAL = "sequential-sgd"
ANY_SHARDS = "any-shards"
PARTITIONS = "split-layout"
ONCE = "shard-push"
PORTIONS = "minibatch-once"
AHEAD = "rounds-of-an-epoch"
PART = "rounds-of-an-epoch"
UNION = "synchronous-sgd"
BACKUP = "backup-workers"
BOUNDED = "staleness-bound"
OPTIM = "shard-optimizer"
WAITING = "no-wait-for-the-gone"
READ_OWN = "own-push-first"
FROZEN = "steady-parameters"
MEASURED = "evaluations"
RATE = "learning-rate"

ORACLES, CONSISTENCY, SWEEP = (
    "tests/simulated/test_oracles.py",
    "tests/simulated/test_consistency.py",
    "tests/simulated/test_sweep.py",
)
BY_SEED = f"{CONSISTENCY}::test_a_seed_that_fails_by_a_mistake"
PROCESSES = "tests/processes/"
ROUNDS = "tests/simulated/test_rounds.py"
DEALT_AHEAD = "tests/simulated/test_dealt_ahead.py"
SHARDING = "tests/core/test_sharding.py"
HOGWILD_SWEEP = "tests/simulated/test_hogwild.py::test_no_fault_loses_a_minibatch_or_leaves_anybody_waiting[0]"
DOWNPOUR_SWEEP = f"{SWEEP}::test_no_fault_loses_or_repeats_a_gradient_and_every_job_ends[0]"

LOCAL = "tests/simulated/test_local_steps.py"

MUTANTS = [
    Mutant("a-change-goes-the-wrong-way", "local-steps", "tasks/flat.py",
        ".copy_(before.view(-1)[some]).sub_(parameter.detach().reshape(-1)[some])",
        ".copy_(parameter.detach().reshape(-1)[some]).sub_(before.view(-1)[some])",
        (f"{LOCAL}::test_rounds_of_local_steps_are_diloco",)),
    Mutant("local-steps-are-made-on-what-was-fetched", "local-steps", "tasks/flat.py",
        "self._staged or self.local is not None", "self._staged",
        (f"{LOCAL}::test_rounds_of_local_steps_are_diloco",)),
    Mutant("local-steps-follow-the-replicas-own-samples", "local-rate", "replica/downpour.py",
        "self._next.samples * plan.settings.replicas)", "self._next.samples)",
        (f"{LOCAL}::test_the_rate_of_local_steps_follows_the_samples_of_the_job_and_gradients_are_clipped",)),
    Mutant("momentum-repeats-each-change", "delayed-nesterov", "server/delayed.py",
        'if state["arrived"] < period:', "if False:",
        (f"{LOCAL}::test_local_steps_that_wait_for_nobody_are_delayed_nesterov",)),
    Mutant("a-period-is-of-one", "delayed-nesterov", "server/shard.py",
        "period = self.policy.taking_part if held_range.has_period else 0", "period = 0",
        (f"{LOCAL}::test_local_steps_that_wait_for_nobody_are_delayed_nesterov",)),
    Mutant("who-rests-takes-no-part", "delayed-nesterov", "core/consistency.py",
        "        if not 0 <= incarnation < self._known.get(who, 0):\n            self.members.pop(who, None)\n",
        "        if not 0 <= incarnation < self._known.get(who, 0):\n            self.members.pop(who, None)\n"
        "            self._taking_part.discard(roles.index_of(who))\n",
        (f"{LOCAL}::test_local_steps_that_wait_for_nobody_are_delayed_nesterov",)),
    Mutant("a-standby-has-a-period-of-one", "delayed-nesterov", "server/standby.py",
        "            self.held.set_options(shard.own.period(event.period))\n", "",
        (f"{LOCAL}::test_a_standby_has_the_momentum_and_the_period",)),
    Mutant("a-late-change-is-thrown-away", "late-changes", "replica/work.py",
        "            if push.dropped and self._again:\n", "            if False:\n",
        (f"{LOCAL}::test_a_change_that_is_late_for_its_round_is_pushed_again",)),
    Mutant("every-replica-makes-as-many-steps", "paced-pushes", "coordination/dealing.py",
        "int(self._paced * min(self._step_seconds.values()) / mine)", "self._paced",
        (f"{LOCAL}::test_steps_by_speed_are_those_of_the_fastest_in_proportion",)),
    Mutant("a-mix-weighs-what-was-fetched", "staggered", "tasks/flat.py",
        "there, 1.0 - alpha)", "there, alpha)",
        (f"{LOCAL}::test_staggered_rounds_are_streaming_diloco",)),
    Mutant("all-parts-leave-at-once", "staggered", "replica/staggered.py",
        "math.ceil((number + 1) * self._goal / shards)", "self._goal",
        (f"{LOCAL}::test_staggered_rounds_are_streaming_diloco",)),
    Mutant("the-rest-of-an-epoch-is-not-sent", "staggered", "replica/staggered.py",
        "        if self._uncounted[0]:\n", "        if False:\n",
        (f"{LOCAL}::test_staggered_rounds_are_streaming_diloco",)),
    Mutant("a-newcomer-begins-where-its-own-model-is", "newcomers", "replica/downpour.py",
        "        yield from self._fetch_all(self.server.whole)\n",
        "        yield from self._fetch_all(self.server.whole)\n        self._local = False\n",
        (f"{LOCAL}::test_a_fresh_replica_is_no_quorum_of_one",)),
    Mutant("a-schedule-is-forgotten-by-the-shard", SEQUENTIAL, "server/slice.py",
        'group["lr"] = rate * factor', 'group["lr"] = rate',
        (f"{ORACLES}::test_one_replica_is_sequential_sgd_with_decay_schedule_and_clipping",)),
    Mutant("buffers-that-are-pushed-are-not-kept", SEQUENTIAL, "server/slice.py",
        "        self._optimize(factor, norms)\n"
        "        for piece, value in zip(self._carried, values, strict=True):\n"
        "            piece.tensor.copy_(value)\n", "        self._optimize(factor, norms)\n",
        ("tests/machines/test_shard.py::test_buffers_are_the_latest_pushs_and_frozen_parameters_stay",)),
    Mutant("a-range-ends-where-no-element-does", ANY_SHARDS, "sharding/assignments.py",
        "* ALIGNMENT for part", "* ALIGNMENT + 2 for part",
        (f"{ORACLES}::test_any_number_of_shards_gives_the_parameters_of_one",)),
    Mutant("a-piece-lies-with-its-tensor-and-not-at-its-partition", PARTITIONS, "sharding/layout.py",
        "here = [entry for entry in placed if entry.piece.partition == partition]",
        "here = [entry for entry in placed if (entry.piece.partition, 0)[entry.tensor.kind != 'parameter'] == "
        "partition]",
        (f"{SHARDING}::test_two_partitions_lie_where_a_reader_counts_them",)),
    Mutant("a-vector-of-a-partition-goes-on-into-the-next", PARTITIONS, "sharding/layout.py",
        "return Range(self.moving.start, self.frozen.stop)",
        "return Range(self.moving.start, self.frozen.stop + ALIGNMENT)",
        (f"{SHARDING}::test_every_piece_lies_once_at_its_partition_in_the_order_of_kind_dtype_and_group",)),
    Mutant("pieces-may-leave-a-gap", PARTITIONS, "sharding/layout.py",
        "if not fits or piece.start != edge or", "if not fits or",
        (f"{SHARDING}::test_pieces_that_are_not_their_tensor_are_refused[gap]",)),
    Mutant("each-further-shard-is-the-first-partitions", PARTITIONS, "sharding/assignments.py",
        "        counts[most] += 1\n", "        counts[0] += 1\n",
        (f"{SHARDING}::test_no_other_sharing_of_the_partitions_has_a_smaller_largest_shard",)),
    Mutant("one-group-for-all-parameters-of-a-shard", SEQUENTIAL, "server/slice.py",
        "**plan.stepped(piece.section.group)} for piece in self._trained]",
        "**plan.layout.stepped(0)} for piece in self._trained]",
        ("tests/simulated/test_large.py::test_biases_and_normalisations_do_not_decay",)),
    Mutant("a-push-of-the-dead-is-judged-like-any", ONCE, "core/ledger.py",
        '        if incarnation < known:\n'
        '            return Judgement(Taking.REFUSE, f"{who} incarnation {incarnation} was replaced by {known}")\n', "",
        ("tests/machines/test_shard.py::test_a_push_of_the_dead_is_neither_applied_nor_acknowledged",)),
    Mutant("a-push-is-done-when-its-first-shard-says-so", ONCE, "replica/work.py",
        "while waiting and not waiting[0].sent:", "while waiting and (not waiting[0].sent or waiting[0] is push):",
        (DOWNPOUR_SWEEP,), seconds=15),
    Mutant(
        "what-a-dead-replica-held-is-dealt-again-one-off", PORTIONS, "core/portions.py",
        "        self._again.extendleft(reversed(held))\n        return sum",
        "        self._again.extendleft(Portion(one.epoch, max(one.first - 1, 0), one.count) for one in held)\n"
        "        return sum",
        (DOWNPOUR_SWEEP, HOGWILD_SWEEP), seconds=20,
    ),
    Mutant("the-rest-of-a-portion-is-its-beginning-again", PORTIONS, "core/portions.py",
        "Portion(self.epoch, self.first + count * self.every, self.count - count, self.every)",
        "Portion(self.epoch, self.first, self.count - count, self.every)",
        ("tests/core/test_portions.py::test_a_portion_that_is_dealt_again_in_pieces_is_dealt_whole",)),
    Mutant(
        "a-checkpoint-forgets-what-is-being-made", PORTIONS, "core/portions.py",
        "(*held, *self._again))", "(*self._again,))",
        ("tests/machines/test_coordinator.py::test_a_checkpoints_position_is_of_the_moment_at_which_all_pushes_are_applied_and_an_error_is_recorded",),
    ),
    Mutant("in-rounds-one-minibatch-is-dealt-at-a-time", AHEAD, "coordination/dealing.py",
        "else self._in_rounds(self._rounds, role, members, before)",
        "else min(1, self._in_rounds(self._rounds, role, members, before))",
        (f"{DEALT_AHEAD}::test_a_round_costs_few_words_with_the_coordinator",)),
    Mutant("more-is-dealt-ahead-than-a-measure-allows", AHEAD, "coordination/dealing.py",
        "before - sum(map(self.held, members))", "math.inf",
        (f"{DEALT_AHEAD}::test_measures_are_made_every_so_many_minibatches_though_many_are_dealt_at_once",)),
    Mutant("a-checkpoint-in-rounds-waits-for-what-was-dealt-ahead", "rounds-of-an-epoch", "coordination/dealing.py",
        "effects = self._recall(members) if withheld else []", "effects: list[Effect] = []",
        (f"{DEALT_AHEAD}::test_a_checkpoint_has_what_was_dealt_ahead_given_back",)),
    Mutant("what-is-given-back-is-dealt-last", "rounds-of-an-epoch", "core/portions.py",
        "self._again.appendleft(end_portion)", "self._again.append(end_portion)",
        ("tests/core/test_portions.py::test_what_is_given_back_is_dealt_next_also_where_more_was_dealt_since",)),
    Mutant("what-is-given-back-is-told-of-when-more-is-wanted", "rounds-of-an-epoch", "replica/downpour.py",
        "if wants or self.work.returns or", "if wants or",
        (BY_SEED,)),
    Mutant("who-is-late-is-dealt-ahead-too", AHEAD, "core/rounds.py",
        "self.leaves_behind = bool(backup or quorum)", "self.leaves_behind = False",
        (f"{DEALT_AHEAD}::test_where_the_slow_are_left_behind_each_is_dealt_one_after_the_other",)),
    Mutant("an-epoch-is-dealt-before-the-one-before-is-done", PART, "core/portions.py",
        "if self._epoch == self.epoch < self.epochs else 0", "if self._epoch < self.epochs else 0",
        (f"{ROUNDS}::test_only_the_last_round_of_an_epoch_is_smaller",)),
    Mutant("who-has-rested-is-not-waited-for-in-the-next-epoch", "whole-gradient", "core/rounds.py",
        "        self._members.update(over)\n", "",
        (f"{ROUNDS}::test_as_many_replicas_as_minibatches_make_the_steps_of_the_whole_gradient",)),
    Mutant("what-the-dead-held-is-dealt-while-a-round-may-hold-it", PART, "coordination/portion_work.py",
        "if job.shards.counts_gone:", "if False:",
        ("tests/machines/test_coordinator.py::"
         "test_what_a_dead_replica_held_is_dealt_when_its_push_is_in_no_round_to_come",)),
    Mutant("a-round-is-the-sum-of-its-gradients", UNION, "core/rounds.py",
        "(key, weights[key] / whole if union else 1.0 / len(keys))", "(key, 1.0)",
        (f"{CONSISTENCY}::test_synchronous_replicas_are_sgd_on_the_union_batch",)),
    Mutant("a-buffer-of-a-round-is-the-sum", UNION, "server/slice.py",
        "_average(piece.working(), value, self._gathered)", "piece.working().add_(value)",
        (f"{CONSISTENCY}::test_buffers_are_averaged_in_rounds",)),
    Mutant("what-all-pushes-have-is-averaged", UNION, "server/slice.py",
        "torch.where((value == mean) | mean.isinf(), mean, moved.to(mean.dtype))", "moved.to(mean.dtype)",
        ("tests/machines/test_shard.py::test_a_buffer_that_all_pushes_have_stays_what_it_is_and_others_are_averaged",)),
    Mutant(
        "another-gradient-than-the-dropped-is-made-again", BACKUP, "core/portions.py",
        "            completed += self.done(who, at - past)\n"
        "            past = at\n"
        "            completed += self._put_back(self._next(who, vain))\n",
        "            completed += self._put_back(self._next(who, vain))\n"
        "            completed += self.done(who, at - past)\n"
        "            past = at\n",
        (BY_SEED,),
    ),
    Mutant("a-dropped-gradient-is-not-made-again", BACKUP, "replica/work.py",
        "            self._dropped.append((self._steps, steps))\n", "            pass\n",
        (f"{CONSISTENCY}::test_a_round_takes_exactly_the_first_gradients_and_the_others_are_dealt_again",)),
    Mutant("a-quorum-does-not-follow-deaths", BACKUP, "core/rounds.py",
        "return quorum_of(self._quorum, members) if", "return quorum_of(self._quorum, self._most) if",
        (f"{CONSISTENCY}::test_a_fraction_follows_deaths_where_a_count_of_backup_workers_does_not",)),
    Mutant("the-floor-follows-the-fastest", BOUNDED, "core/consistency.py",
        "min(self.members.values()))", "max(self.members.values()))",
        (f"{CONSISTENCY}::test_no_step_begins_more_than_the_bound_ahead_of_what_is_applied",)),
    Mutant("with-a-bound-every-step-fetches", BOUNDED, "replica/downpour.py",
        "self.server.held.floor < tick - self._policy.bound", "self._policy.bound < math.inf",
        (f"{CONSISTENCY}::test_an_infinite_bound_is_downpour",)),
    Mutant("softsync-adds-where-it-is-to-average", OPTIM, "core/consistency.py",
        "return PlannedUpdate(samples, 1.0 / count, (),", "return PlannedUpdate(samples, 1.0, (),",
        (BY_SEED,)),
    Mutant("the-scale-of-a-stale-push-is-not-used", OPTIM, "server/shard.py",
        "                factor *= verdict.scale\n", "",
        (f"{CONSISTENCY}::test_each_scaling_is_another",)),
    Mutant("a-round-waits-for-the-dead", WAITING, "core/rounds.py",
        "        self._members.discard(who)\n        self._coming.discard(who)\n        self._resting.pop(who, None)\n",
        "        self._coming.discard(who)\n        self._resting.pop(who, None)\n",
        (f"{CONSISTENCY}::test_a_round_waits_for_the_slowest_and_not_for_the_dead",)),
    Mutant("a-bound-waits-for-those-who-have-left", WAITING, "core/consistency.py",
        "            self.members.pop(who, None)\n            self._rise()\n", "            pass\n",
        (f"{CONSISTENCY}::test_no_step_begins_more_than_the_bound_ahead_of_what_is_applied",), hangs=True),
    Mutant("softsync-wants-the-pushes-of-those-who-have-left", WAITING, "core/consistency.py",
        "return max(1, len(self.members) // self._n)", "return max(1, len(self._known) // self._n)",
        (f"{CONSISTENCY}::test_softsync_wants_no_pushes_of_the_dead",)),
    Mutant("a-step-computes-on-what-was-asked-for-a-step-ago", READ_OWN, "replica/downpour.py",
        "        if not self._in_flight:\n"
        "            yield from self.server.fetch(landing, self.server.moving, self._tick)\n"
        "        yield from self._await_parameters(*self._models)\n"
        "        if self._pushes_again:\n", "        yield from self._await_parameters(*self._models)\n"
        "        self._replica.vectors.swap(landing)\n"
        "        yield from self.server.fetch(landing, self.server.moving, self._tick)\n"
        "        return\n"
        "        if self._pushes_again:\n",
        (f"{ORACLES}::test_one_replica_is_sequential_sgd",)),
    Mutant("what-is-fetched-ahead-lands-under-the-step", FROZEN, "replica/downpour.py",
        "        self._in_flight = True\n"
        "        yield from self.server.fetch(1 - self._landing,", "        self._in_flight = True\n"
        "        yield from self.server.fetch(self._landing,",
        (f"{CONSISTENCY}::test_what_is_fetched_ahead_never_lands_in_the_parameters_that_a_step_computes_with",)),
    Mutant("who-is-left-behind-by-rounds-computes-where-they-step", FROZEN, "strategies/parameter_server/options.py",
        "waits = not (self.backup_workers or self.quorum or self.standby or self.local)", "waits = not self.standby",
        (f"{PROCESSES}test_consistency.py::test_replicas_find_what_the_shards_step_in_rounds_of_all_only",)),
    Mutant("what-a-model-writes-where-all-compute-is-not-seen", "shared-parameters", "tasks/flat.py",
        "            if after != before:\n", "            if False:\n",
        (f"{PROCESSES}test_consistency.py::"
         "test_a_model_that_writes_to_a_parameter_where_others_read_it_is_named",), seconds=15),
    Mutant("a-frozen-parameter-is-taken-again-at-every-step", "shared-parameters", "strategies/players.py",
        "size = moving if landing in begun else there.numel()", "size = there.numel()",
        (f"{PROCESSES}test_consistency.py::"
         "test_a_replica_that_computes_where_the_shards_step_has_the_bits_of_one_that_is_sent_them",), seconds=15),
    Mutant("who-shares-a-host-is-sent-parameters", "shared-parameters", "places/simulated/simulation.py",
        'return shared and self.cluster.one_host and not self._direct', "return False and not self._direct",
        ("tests/simulated/test_handling.py::"
         "test_who_shares_a_host_with_the_shards_is_sent_no_parameters_in_rounds_of_all",)),
    Mutant("nobody-finds-what-he-asks-for", "shared-parameters", "transport/shared.py",
        "            if not self.finds(link.role):\n", "            if True:\n",
        (f"{PROCESSES}test_shared.py::"
         "test_who_finds_what_it_asks_for_where_it_is_is_told_and_nothing_is_written_for_it",)),
    Mutant("a-gradient-is-written-where-shards-still-read", FROZEN, "replica/downpour.py",
        "        while self._pushes.busy[self._slot * len(self._models) + model]:\n"
        "            yield from self.wait()\n", "        yield from ()\n",
        (DOWNPOUR_SWEEP,), seconds=15),
    Mutant("the-schedule-counts-the-warm-up-too", RATE, "core/optimizer.py",
        "since = (samples - warming) / (total - warming)", "since = samples / total",
        ("tests/core/test_settings.py::test_the_learning_rate_is_what_its_options_say",)),
    Mutant(
        "the-warm-up-begins-at-nothing", RATE, "core/optimizer.py",
        "else 1.0 + (scale - 1.0) * samples / warming", "else scale * samples / warming",
        ("tests/core/test_settings.py::test_warm_up_adds_the_same_to_the_rate_with_every_update_from_the_base_rate_to_the_scaled_one",),
    ),
    Mutant("a-rate-is-of-the-samples-after-its-update", RATE, "server/shard.py",
        "factor = held_range.rate(self.samples) * mean", "factor = held_range.rate(self.samples + due.samples) * mean",
        (BY_SEED,)),
    Mutant("an-evaluator-asks-before-it-is-to-measure", MEASURED, "replica/evaluator.py",
        "        yield from self._fetch(plan, frozen=True)\n        number",
        "        yield from self._fetch(plan, frozen=True, moving=True)\n        number",
        (f"{CONSISTENCY}::test_an_evaluator_that_comes_again_measures_although_shards_wait_for_their_standbys",)),
    Mutant(
        "a-fetch-that-waits-is-replaced-by-another", MEASURED, "server/shard.py",
        "if held_back is not None and held_back.incarnation == event.incarnation:", "if False:",
        ("tests/machines/test_shard.py::test_a_fetch_that_waits_is_answered_once_and_asking_again_is_refused_but_to_a_next_life",),
    ),
    Mutant(
        "a-dead-evaluators-fetch-is-answered", MEASURED, "server/shard.py",
        "            self._forget_fetches(sender, event.incarnation)\n            return []", "            return []",
        ("tests/machines/test_shard.py::test_an_evaluator_waits_for_the_standby_and_what_it_waited_for_is_not_sent_to_its_next_life",),
    ),
]  # fmt: skip
