"""Mutants of the simulator: what a seed decides, what costs time there, and who waits for whom."""

from mutants import Mutant

SEED = "same-seed"
TRACES = "tests/simulated/test_traces.py::"
COSTS = "simulated-time"
HOLDS = "invariants"

SHARED = "switch-flows"

MUTANTS = [
    Mutant("a-walk-does-not-go-down-at-once", SHARED, "network/graph.py",
        "stack.pop()", "stack.pop(0)",
        ("tests/core/test_topologies.py::test_a_ring_in_walk_order_takes_each_directed_link_of_a_tree_once",)),
    Mutant("slim-flies-are-of-whole-numbers", SHARED, "network/shapes.py",
        "field.plus(field.times(m, x), c)", "(m * x + c) % q",
        ("tests/core/test_topologies.py::test_a_slim_fly_is_that_of_the_paper",)),
    Mutant("a-virtual-standby-is-at-its-shards-switch", "shard-hosts", "transport/routed.py",
        "if self._switches[host] != self._switches[shard]), others[0])", "), others[0])",
        ("tests/machines/test_shares.py::test_shards_and_standbys_are_spread_over_switches",)),
    Mutant("a-late-clock-stands-still", SHARED, "network/shares.py",
        " and moment + left / link.rate > moment:", ":",
        ("tests/machines/test_shares.py::test_flows_end_also_where_the_clock_cannot_tell_their_last_bytes",)),
    Mutant("what-others-leave-of-a-link-is-nobodys", SHARED, "network/shares.py",
        "                    room -= flow.part", "                    room -= link.capacity / len(link.flows)",
        ("tests/machines/test_shares.py::test_shares_are_max_min_fair",)),
    Mutant("what-is-sent-next-overtakes", SHARED, "transport/routed.py",
        "        if flow.queue:\n            flow.queue.append((size, what))\n        elif size <= PACKET:",
        "        if size <= PACKET:",
        ("tests/machines/test_shares.py::test_what_fits_a_packet_waits_for_nobody_but_its_own_link",)),
    # no other test notices these: what they leave behind is looked at by nobody but `validate`
    Mutant("who-attends-rests-on", HOLDS, "core/rounds.py",
        "        self._dead.pop(who, None)\n        self._resting.pop(who, None)\n",
        "        self._dead.pop(who, None)\n",
        ("tests/simulated/test_consistency.py::test_a_round_waits_for_the_slowest_and_not_for_the_dead",)),
    Mutant("who-is-gone-is-doubted", HOLDS, "coordination/shards.py",
        "        self._doubted = {doubted for doubted in self._doubted if doubted[0] != role}\n        if incarnation",
        "        if incarnation",
        ("tests/simulated/test_consistency.py::test_what_failed_once_does_not_fail_again",)),
    Mutant("a-life-that-is-granted-to-a-standby-is-due", HOLDS, "places/supervisor.py",
        "        self._wanted.pop(record.role, None)\n", "",
        ("tests/machines/test_supervisor.py::test_any_history_keeps_what_must_hold",)),
    Mutant("the-network-has-a-chance-of-its-own", SEED, "transport/virtual.py",
        "self.chance = random.Random(settings.seed)", "self.chance = random.Random()",
        (TRACES + "test_one_seed_is_one_trace_and_one_vector_and_another_seed_is_another",), seconds=8),
    Mutant("an-update-costs-a-simulated-shard-no-time", COSTS, "places/simulated/handling.py",
        "return 0.0 if self._gathers or payload is None else self.update(payload.nbytes)", "return 0.0",
        (
            "tests/simulated/test_handling.py::test_taking_a_message_costs_the_vectors_that_it_touches",
            "tests/simulated/test_handling.py::test_a_step_of_downpour_takes_what_its_messages_cost",
        )),
    Mutant(
        "a-simulated-machine-does-all-things-at-once", COSTS, "transport/virtual.py",
        "if self._queues and (self._waiting or self.thread.works()):", "if self._queues and self._waiting:",
        (
            "tests/machines/test_processors.py::test_a_machine_is_handed_one_message_after_the_other_and_its_answers_leave_when_its_work_is_done",
        ),
    ),
    Mutant("what-a-simulated-role-works-for-is-said-before-it-is-done", COSTS, "transport/virtual.py",
        "if seconds or self.thread.works():", "if seconds < 0:",
        ("tests/machines/test_processors.py::test_who_dies_says_nothing_that_waited_and_hears_nothing",)),
    Mutant("a-word-that-waits-is-taken-for-one-of-the-next-life", COSTS, "transport/virtual.py",
        "if self.links[sender.role].peer is sender or isinstance(arrival.event, Lost):", "if sender is not None:",
        ("tests/simulated/test_sweep.py::test_a_word_of_a_former_life_that_waits_is_not_taken_for_one_of_the_next",)),
    Mutant("every-role-of-a-host-has-all-its-cores", COSTS, "transport/cluster_model.py",
        "return slowed * busy / working", "return slowed",
        (
            "tests/machines/test_processors.py::test_those_who_work_share_the_cores_evenly",
            "tests/simulated/test_handling.py::test_four_replicas_on_one_core_take_four_times_the_time_of_one",
        )),
    Mutant("a-simulated-round-is-updated-once-for-each-gradient", COSTS, "places/simulated/handling.py",
        "                self._known = updates\n", "",
        ("tests/simulated/test_handling.py::test_a_round_costs_an_addition_for_each_gradient_and_one_update",)),
    Mutant("simulated-single-updates-in-no-time", COSTS, "places/simulated/alone.py",
        "                steps.update()\n            clock.time += seconds\n", "                steps.update()\n",
        ("tests/simulated/test_handling.py::test_single_takes_the_pace_of_its_steps_and_the_time_of_its_updates",)),
]  # fmt: skip
