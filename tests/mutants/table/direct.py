"""Mutants of the direct path: replicas that make the shards' updates themselves."""

from mutants import Mutant

DIRECT = "On the direct path (`--path`, where a job allows it by itself) replicas make the shards' updates themselves"

PASSED = "tests/machines/test_passed.py::"
PROCESSES = "tests/processes/test_direct.py::"
KILLED = PROCESSES + "test_whoever_is_killed_at_any_step_of_an_update_has_made_it_or_not"

SIMULATED = "tests/simulated/test_direct_path.py::"

MUTANTS = [
    Mutant(
        "a-simulated-holder-keeps-its-lock-when-it-dies",
        DIRECT,
        "transport/virtual.py",
        "        self._leave_turns()\n",
        "",
        (SIMULATED + "test_a_holder_that_dies_in_the_middle_of_an_update_has_made_none",),
    ),
    Mutant(
        "a-simulated-lock-is-for-many",
        DIRECT,
        "transport/virtual.py",
        "        if len(peer.turns) == 1:\n            peer._begin_turn()",
        "        peer._begin_turn()",
        (SIMULATED + "test_a_shard_is_updated_by_one_replica_at_a_time_in_the_replicas_own_time",),
    ),
    Mutant(
        "an-update-is-made-where-everybody-reads",
        DIRECT,
        "server/passed.py",
        "        return self._own[self.newest == self._own[0]]",
        "        return self._own[self.newest != self._own[0]]",
        (KILLED,),
    ),
    Mutant(
        "what-others-have-done-is-not-looked-at",
        DIRECT,
        "runtime/direct.py",
        "        if self._known != self.held.changes:",
        "        if self._known < 0:",
        (KILLED,),
    ),
    Mutant(
        "a-state-stays-with-whoever-has-made-it",
        DIRECT,
        "server/passed.py",
        "            self._keep(one, self._changed)\n",
        "",
        (PASSED + "test_whoever_makes_an_update_makes_the_bits_of_one_slice",),
    ),
    Mutant(
        "a-shard-that-comes-again-knows-nothing",
        DIRECT,
        "runtime/direct.py",
        "if isinstance(held, PassedSlice) and held.changes:",
        "if isinstance(held, PassedSlice) and held.changes < 0:",
        (PROCESSES + "test_the_next_life_of_a_shard_goes_on_where_its_replicas_are",),
    ),
]
