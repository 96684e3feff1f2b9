"""Mutants of the direct path: replicas that make the shards' updates themselves."""

from mutants import Mutant

DIRECT = "direct-updates"

WAITS = "direct-end"

PASSED = "tests/machines/test_passed.py::"
PROCESSES = "tests/processes/test_direct.py::"
KILLED = PROCESSES + "test_whoever_is_killed_at_any_step_of_an_update_has_made_it_or_not"

SIMULATED = "tests/simulated/test_direct_path.py::"
LOST = SIMULATED + "test_a_shard_whose_process_dies_at_any_message_has_lost_nothing_as_the_job_ends"

COORDINATOR = "tests/machines/test_coordinator.py::"
ENDS = COORDINATOR + "test_a_job_ends_with_everything_whenever_a_shard_dies_whose_memory_outlives_it"

LEFT = PASSED + "test_a_gradient_that_is_left_where_it_was_made_is_numbers_alone_until_its_push_is_made"
ASKED = "tests/machines/test_stories.py::test_an_answer_to_what_was_asked_of_a_life_before_counts_for_nothing"
LATER = SIMULATED + "test_what_was_asked_of_a_shard_that_died_answers_nothing_that_is_asked_later[19]"

SHARES = "bench-sensitivity"
BENCHES = "tests/slow/test_benches.py::test_the_shares_of_train_fall_with_what_makes_ours_or_a_plain_loop_slow"

MUTANTS = [
    Mutant("an-update-of-the-plain-loop-takes-twenty-milliseconds-more", SHARES, "../benchmarks/parts/plain.py",
        "        numbers[shared.ranks] = to\n",
        "        select.select([], [], [], 0.02)\n        numbers[shared.ranks] = to\n",
        (BENCHES,), seconds=60),
    Mutant("an-answer-is-taken-for-that-to-any-question", WAITS, "replica/links.py",
        "(number is None or message.number == number)", "(number is None or message.number >= number)",
        (ASKED, LATER)),
    Mutant(
        "a-gradient-is-let-go-before-its-push-is-made", WAITS, "tasks/flat.py",
        "        if self._copied:\n            self._arrive(landing, parts)\n",
        "        self._lying = [() for _ in self._lying]\n        if self._copied:\n"
        "            self._arrive(landing, parts)\n",
        (LEFT,),
    ),
    Mutant("a-simulated-holder-keeps-its-lock-when-it-dies", "simulated-direct-path", "transport/virtual.py",
        "            memory.leave(self)\n", "            pass\n",
        (SIMULATED + "test_a_holder_that_dies_in_the_middle_of_an_update_has_made_none",)),
    Mutant("a-simulated-lock-is-for-many", "simulated-direct-path", "transport/virtual.py",
        "        if len(self.turns) == 1:\n            self._begin()", "        self._begin()",
        (SIMULATED + "test_a_shard_is_updated_by_one_replica_at_a_time_in_the_replicas_own_time",)),
    Mutant("who-waits-for-others-takes-the-lock-again-and-again", "direct-updates", "runtime/direct.py",
        "            if self._seen.get(to) == shared.held.changes:", "            if self._seen.get(to) == -1:",
        (PROCESSES + "test_who_waits_for_others_takes_the_lock_again_only_once_something_has_changed",)),
    Mutant("who-waits-has-seen-what-it-was-not-judged-by", "direct-updates", "runtime/direct.py",
        "                self._seen[to] = shared.known", "                self._seen[to] = shared.held.changes",
        (PROCESSES + "test_a_change_between_a_turn_and_the_wait_after_it_is_seen",)),
    Mutant("a-state-is-stepped-where-everybody-reads", "direct-death", "server/passed.py",
        "        return published if self._changed < 0 else 1 - published", "        return published",
        (KILLED,)),
    Mutant("what-others-have-done-is-not-looked-at", DIRECT, "runtime/direct.py",
        "        if self.known != self.held.changes:", "        if self.known < 0:",
        (KILLED,)),
    Mutant("what-is-averaged-is-left-where-it-was-made", DIRECT, "runtime/direct.py",
        "pushing.push_steps == 1 and not settings.policy.gathers", "pushing.push_steps == 1",
        (PROCESSES + "test_several_replicas_do_the_work_of_a_job_and_no_sample_twice",)),
    Mutant("several-steps-are-left-where-the-last-was-made", DIRECT, "runtime/direct.py",
        "settings.strategy.pushing.push_steps == 1 and ", "",
        (PROCESSES + "test_one_replica_makes_the_bits_that_the_shards_processes_make",)),
    Mutant("of-a-parameter-that-is-cut-the-first-elements-step-every-part", DIRECT, "sharding/layout.py",
        "slice((self.part.start - start) // item, (self.part.stop - start) // item)",
        "slice(0, self.part.size // item)",
        (PASSED + "test_gradients_that_were_left_where_they_were_made_step_as_those_in_a_slot",)),
    Mutant("a-state-stays-with-whoever-has-made-it", DIRECT, "server/passed.py",
        "            self._keep(held)\n", "",
        (PASSED + "test_whoever_makes_an_update_makes_the_bits_of_one_slice",)),
    Mutant("a-shard-that-comes-again-knows-nothing", "direct-death", "runtime/direct.py",
        "if isinstance(held, PassedSlice) and held.changes:", "if isinstance(held, PassedSlice) and held.changes < 0:",
        (PROCESSES + "test_the_next_life_of_a_shard_goes_on_where_its_replicas_are",)),
    Mutant("a-shard-does-not-tell-that-its-memory-lasts", WAITS, "server/passed.py",
        "    lasts = True\n", "    lasts = False\n",
        (PROCESSES + "test_the_next_life_of_a_shard_goes_on_where_its_replicas_are",)),
    Mutant("a-job-without-replicas-waits-for-no-shard", WAITS, "coordination/shards.py",
        "self.lasts(role) or self._succeeded", "self._succeeded",
        (LOST,)),
    Mutant("a-job-that-closes-waits-for-no-shard", WAITS, "coordination/shard_holders.py",
        "        if job.shards.lasts(role):\n            return None\n", "",
        (ENDS,)),
    Mutant(
        "a-shard-whose-memory-lasts-comes-again-for-ever", WAITS, "coordination/shard_holders.py",
        "        if role in job.registry.over:\n            return Cause.SHARD_SPENT\n"
        "        if job.shards.lasts(role):\n            return None\n",
        "        if job.shards.lasts(role):\n            return None\n"
        "        if role in job.registry.over:\n            return Cause.SHARD_SPENT\n",
        (COORDINATOR + "test_a_shard_whose_memory_outlives_it_is_waited_for_as_often_as_it_may_come_again",),
    ),
]  # fmt: skip
