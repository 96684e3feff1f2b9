"""Mutants of what replicas do together without a server: all-reduce, large minibatches, and one memory for all."""

from mutants import Mutant

LARGE, ALL = "tests/simulated/test_large.py", "tests/simulated/test_allreduce.py"
COLUMNS, NORMS = "tests/simulated/test_columns.py", "tests/core/test_norms.py"
PROOFS, RACES = "tests/core/test_schedules.py", "tests/simulated/test_hogwild.py"
ALONE = f"{RACES}::test_one_replica_is_sequential_sgd"
BY_TURNS = "tests/processes/test_hogwild.py"
BY_LOCK = f"{BY_TURNS}::test_under_locks_no_update_is_lost"
PAPERS = "layerwise-optimizers"
UNION = "accumulated-rounds"
PROVED = "schedule-proof"
ONE_MEMORY = "memory-sgd"
COUNTED = "hogwild-memory"
LOCK = "lock-of-the-dead"
ROWS = "sparse-updates"
FABRICS = "fabric"
HOOK = "ddp-hook"
SEQUENTIAL = "allreduce-sgd"
EXACTLY_ONE = "allreduce-once"
SPLIT = "split-allreduce"
IN_PARTS = "parts-on-a-link"
NONE_LOST = "locking-updates"
TURNS = "turns"

MUTANTS = [
    Mutant("a-partition-updates-before-the-others-hold-their-sums", "allreduce-once",
        "strategies/grouped/replica.py",
        "self.whole.clip((yield from self._siblings.whole_norm(self.whole.norm(), self._wait)))",
        "self.whole.clip(self.whole.norm())",
        (f"{COLUMNS}::test_whoever_dies_at_whatever_message_each_minibatch_is_in_one_update",), 20),
    Mutant("a-partition-clips-by-its-own-norm", SPLIT, "replica/siblings.py",
        "math.hypot(*(part.norm for part in parts))", "norm",
        (f"{COLUMNS}::test_split_replicas_are_sequential_sgd_on_the_union",), 20),
    Mutant("what-partitions-hold-is-measured-of-the-evaluation-before", SPLIT, "strategies/grouped/replica.py",
        "yield from self._siblings.tell(request, awaited=True)", "yield from self._siblings.tell(request)",
        (f"{COLUMNS}::test_it_is_measured_and_saved_as_whole_replicas_are",), 20),
    Mutant(
        "what-is-measured-is-sent-at-once", IN_PARTS, "strategies/grouped/replica.py",
        "            if left:\n", "            if False:\n",
        (f"{COLUMNS}::test_what_partitions_hold_comes_to_who_measures_in_parts_that_wait_until_those_before_are_taken",),
        20,
    ),
    Mutant(
        "who-comes-again-is-sent-everything-at-once", IN_PARTS, "strategies/grouped/replica.py",
        "if sent >= CHUNK and left:", "if False:",
        (f"{COLUMNS}::test_who_comes_again_is_given_what_another_holds_in_parts_that_wait_until_those_before_are_taken",),
        20,
    ),
    Mutant("a-partition-goes-on-from-the-part-of-another", "allreduce-once", "strategies/grouped/replica.py",
        "yield Load(assembly.checkpoint, assembly.plan, self._siblings.partition)",
        "yield Load(assembly.checkpoint, assembly.plan, 0)",
        (f"{COLUMNS}::test_all_gone_it_goes_on_from_the_parts_of_its_checkpoint",), 20),
    Mutant(
        "norms-of-a-shard-that-takes-over-are-100-times-theirs", PAPERS, "core/norms.py",
        "        for norms in known:\n            self._keep(norms)",
        "        for norms in known:\n            self._keep(Norms(norms.round, tuple((layer, 1e4 * w, m) for layer, "
        "w, m in norms.of)))",
        (f"{NORMS}::test_a_new_ruler_knows_what_the_one_before_had_told_and_adds_up_the_rest_anew",), 5,
    ),
    Mutant("a-partition-steps-by-the-norms-of-its-own-part", PAPERS, "replica/siblings.py",
        "added(part.of for part in parts)", "squares",
        (f"{LARGE}::test_lars_and_lamb_are_those_of_the_papers_wherever_a_layer_is_cut[allreduce by neurons]",), 8),
    Mutant("moments-move-before-norms-are-known", PAPERS, "server/layerwise.py",
        '        steps = float(state["step"]) + 1\n',
        '        state["step"] += 1\n        steps = float(state["step"])\n',
        (f"{LARGE}::test_partitions_that_die_at_whatever_message_leave_the_parameters_of_the_paper[lamb-replica 0.0]",),
        15),
    Mutant("a-standby-steps-by-the-norms-of-its-own-part", PAPERS, "server/standby.py",
        "self.held.step(event.factor, event.weight, event.norms)", "self.held.step(event.factor, event.weight)",
        (f"{LARGE}::test_a_death_in_the_middle_of_an_exchange_ends_in_the_same_job",), 30),
    Mutant("an-accumulated-gradient-is-not-weighed", UNION, "strategies/grouped/whole.py",
        "view.add_(gradient.to(view.device), alpha=self._weight)", "view.add_(gradient)",
        (f"{LARGE}::test_accumulated_gradients_are_those_of_the_union",)),
    Mutant("a-round-batch-of-the-last-group-is-made", EXACTLY_ONE, "strategies/grouped/replica.py",
        "if not (isinstance(item, dealing.Deal) or self._siblings.follows)]", "if not self._siblings.follows]",
        (f"{ALL}::test_who_comes_again_is_given_what_the_others_hold",), 10, hangs=True),
    Mutant("a-group-is-dealt-rounds-while-a-checkpoint-waits-for-them", "allreduce-epochs",
        "strategies/grouped/group_holders.py",
        "or job.saving.holds or job.evaluations.pending", "or job.evaluations.pending",
        (f"{ALL}::test_pushes_between_checkpoints",), 10),
    Mutant("a-checkpoint-is-written-while-a-group-is-formed", "allreduce-epochs", "coordination/coordinator.py",
        "        if not self.holders.ready(self):\n            return []  # while",
        "        if not self:\n            return []  # while",
        ("tests/machines/test_forming.py::test_a_checkpoint_waits_for_a_round_that_only_the_dead_had_a_minibatch_of",)),
    Mutant("a-lock-is-shared", NONE_LOST, "transport/shared.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
        (BY_LOCK,), 15),
    Mutant("a-turn-stays-with-who-had-it", TURNS, "core/consistency.py",
        "self.floor += self._passed(key.who) + 1", "self.floor += self._passed(key.who)",
        (
            f"{RACES}::test_by_turns_replicas_update_one_after_another",
            f"{RACES}::test_by_turns_it_is_one_loop_with_gradients_of_one_turn_ago",
        ), 10, hangs=True),
    Mutant("who-waits-for-a-checkpoint-keeps-its-turn", TURNS, "replica/downpour.py",
        "            if self._attending is not None:\n                yield from self._sit_out(epoch)\n"
        "            yield from self.wait()\n",
        "            yield from self.wait()\n",
        (f"{RACES}::test_by_turns_nobody_waits_for_who_waits_for_a_checkpoint",), 10, hangs=True),
    Mutant("a-shard-forgets-what-replicas-have-counted", COUNTED, "server/unlocked.py",
        "if not held.counts.filled:\n            return super()", "if True:\n            return super()",
        (f"{RACES}::test_a_shard_that_dies_costs_hogwild_nothing",), 10, hangs=True),
    Mutant("what-a-group-has-not-done-is-dealt-to-nobody", EXACTLY_ONE, "strategies/grouped/round_batches.py",
        "return self._dealer.lost(GROUP)", "return self._dealer.held(GROUP)",
        (f"{ALL}::test_a_death_at_any_message_is_survived_by_the_others",), 10),
    Mutant("whole-sums-are-added-to-parts-of-them", SEQUENTIAL, "fabric/messages.py",
        "here[key], move.adds)", "here[key], True)",
        (
            f"{ALL}::test_n_replicas_are_sequential_sgd_on_the_union",
            "tests/machines/test_reductions.py::test_pieces_that_arrive_in_any_order_are_summed",
        ), 15),
    Mutant("who-reads-last-is-not-waited-for", FABRICS, "fabric/memory.py",
        "                self._begun[bucket] = True\n", "                del self._begun[bucket]\n",
        ("tests/machines/test_fabrics.py::test_shared_memory_is_a_fabric[3]",), 15),
    Mutant("another-order-of-writes-is-taken", FABRICS, "fabric/order.py",
        'return platform.machine() in ("x86_64", "AMD64")', "return bool(platform.machine())",
        ("tests/machines/test_reductions.py::"
            "test_a_machine_that_shows_writes_in_another_order_is_refused_with_its_name",)),
    Mutant("each-rank-sends-what-it-has-to-all", PROVED, "schedules/allreduce.py",
        '    "ring": ring,\n', '    "ring": naive,\n',
        ("tests/processes/test_links.py::test_each_rank_sends_and_receives_its_share_of_the_least",), 20),
    Mutant("a-step-is-taken-before-all-has-come", FABRICS, "fabric/messages.py",
        "        if len(here) < len(step.receives):\n            return False\n",
        "        if step.receives and not here:\n            return False\n",
        (
            "tests/machines/test_fabrics.py::test_messages_are_a_fabric[3]",
            "tests/machines/test_reductions.py::test_pieces_that_arrive_in_any_order_are_summed",
        ), 15),
    Mutant("timers-stand-still-while-a-reduction-runs", "fabric-timers", "runtime/player.py",
        "            glance()\n", "            self.told()\n",
        ("tests/machines/test_reducing.py::test_timers_and_other_roles_go_on_while_a_reduction_waits",)),
    Mutant("the-second-half-of-a-ring-begins-with-another-part", PROVED, "schedules/allreduce.py",
        "_around(members, whole, 0, False)", "_around(members, whole, 1, False)",
        (f"{PROOFS}::test_every_schedule_is_proved_and_moves_the_bytes_of_its_formula",
            f"{PROOFS}::test_every_schedule_sums")),
    Mutant("a-proof-lets-a-part-be-added-twice", PROVED, "lab/draw/schedules.py",
        "elif sent.ranks & held.ranks:", "elif sent.ranks & held.ranks == (1 << schedule.ranks) - 1:",
        (f"{PROOFS}::test_the_checker_refuses_what_is_no_all_reduce",)),
    Mutant("a-port-takes-many-messages-at-once", "schedule-price", "schedules/price.py",
        "arrives, room = leaves + latency, target.arrives + takes",
        "arrives, room = leaves + latency, leaves + latency",
        (f"{PROOFS}::test_prices_are_those_of_the_table",
            f"{PROOFS}::test_prices_are_those_of_the_formulas_with_the_cost_of_adding")),
    Mutant("the-dearest-algorithm-is-taken", "schedule-price", "schedules/price.py",
        "return min(prices, key", "return max(prices, key",
        (f"{PROOFS}::test_the_cheapest_changes_with_the_length",)),
    Mutant("a-gradient-is-written-over-before-all-have-added-it", HOOK, "fabric/memory.py",
        "        self._wait(number % DEPTH, 2 * (number + 1) + 1)\n", "",
        ("tests/processes/test_window.py::test_no_chunk_is_written_over_before_the_other_has_had_it[_add-4]",)),
    Mutant("all-parameters-have-one-momentum", ONE_MEMORY, "strategies/parameter_server/players.py",
        "value[start : start + parameter.numel()]", "value[: parameter.numel()]",
        (ALONE,)),
    Mutant("gradients-are-kept-for-the-next-step", ONE_MEMORY, "tasks/worker.py",
        "            parameter.grad = None\n", "            pass\n",
        ("tests/simulated/test_single.py::test_a_checkpoint_goes_from_downpour_to_single_and_back_exactly",)),
    Mutant("a-lock-stays-with-a-file-that-others-have-open", LOCK, "transport/shared.py",
        "fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)",
        'fcntl.fcntl(self._descriptor, 37, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))  # F_OFD_SETLK',
        ("tests/processes/test_hogwild.py::test_locks_are_the_kernels",)),
    Mutant(
        "a-sparse-gradient-is-made-dense", ROWS, "strategies/parameter_server/players.py",
        "        return entry.size // entry.shape[0] * gradient._nnz()\n",
        "        gradient.data = gradient.to_dense()\n        return entry.size\n",
        (f"{RACES}::test_a_sparse_update_writes_to_its_rows_only",),
    ),
]  # fmt: skip
