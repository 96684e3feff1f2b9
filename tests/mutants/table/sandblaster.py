"""Mutants of Sandblaster: its iterates, the sums of work_units, their order, and its standbys."""

from mutants import Mutant

ITERATES = "sandblaster-iterates"
EXACTLY_ONCE = "portion-once"
BITS = "deterministic-sums"
STANDBY = "sandblaster-standby"
NO_VECTOR = "vectors-on-shards"

ORACLES, MACHINE, STANDBYS = (
    "tests/simulated/test_sandblaster_oracles.py",
    "tests/machines/test_descent.py",
    "tests/simulated/test_sandblaster_standby.py",
)
SWEEP = (
    "tests/simulated/test_sandblaster_faults.py"
    "::test_no_fault_loses_or_repeats_a_portion_and_the_result_has_the_same_bits[0]"
)
SPLIT_SWEEP, WAITED = (
    "tests/simulated/test_sandblaster_faults.py::test_no_fault_loses_or_repeats_a_portion_of_split_replicas[0]",
    "tests/simulated/test_sandblaster_faults.py::test_what_split_replicas_waited_for_for_ever",
)

MUTANTS = [
    Mutant("a-slope-that-still-falls-is-flat", ITERATES, "strategies/sandblaster/methods.py",
        "return abs(trial.slope) <= -start.curvature * start.slope",
        "return trial.slope <= -start.curvature * start.slope",
        ("tests/core/test_line_search.py::test_a_step_of_wolfe_satisfies_the_strong_conditions_and_is_the_last_tried",),
    ),
    Mutant("the-loss-is-the-sum-over-samples", ITERATES, "strategies/sandblaster/stories.py",
        "return gathered.loss / gathered.samples + 0.5", "return gathered.loss + 0.5",
        (f"{ORACLES}::test_the_iterates_are_those_of_torchs_lbfgs",)),
    Mutant("decay-is-in-the-gradient-and-not-in-the-loss", ITERATES, "strategies/sandblaster/stories.py",
        "+ 0.5 * decay * square, scalars", ", scalars",
        (f"{ORACLES}::test_a_short_history_and_weight_decay_are_those_of_the_plain_method",)),
    Mutant("a-work-unit-is-told-of-before-all-partitions-have-sent-it", EXACTLY_ONCE,
        "strategies/sandblaster/replica.py",
        "            if len(parts) < len(self._siblings.followers):\n                continue\n", "",
        (SPLIT_SWEEP,), 20),
    Mutant("what-a-partition-asks-for-its-lead-keeps-to-itself", EXACTLY_ONCE, "strategies/sandblaster/replica.py",
        "        yield from self._siblings.relayed()\n", "",
        (f"{WAITED}[21]",), 10),
    Mutant("a-copy-of-a-work-unit-is-added", EXACTLY_ONCE, "strategies/sandblaster/shard.py",
        "if event.evaluation == floor and event.number not in self._taken:", "if event.evaluation == floor:",
        (f"{MACHINE}::test_a_work_unit_is_summed_once_whoever_sends_it_again",)),
    Mutant("a-work-unit-of-the-last-evaluation-is-added", EXACTLY_ONCE, "strategies/sandblaster/shard.py",
        "if event.evaluation == floor and event.number not in self._taken:", "if event.number not in self._taken:",
        (f"{MACHINE}::test_what_comes_after_its_evaluation_is_acknowledged_and_ignored",)),
    Mutant("another-work-unit-than-the-dead-ones-is-dealt-again", EXACTLY_ONCE, "strategies/sandblaster/evaluating.py",
        "                self._unheld.append(number)\n"
        "                self._fresh_left", "                self._unheld.append(max(number - 1, 0))\n"
        "                self._fresh_left",
        ("tests/core/test_work_units.py::test_what_the_dead_one_held_is_dealt_again",)),
    Mutant("the-coordinator-counts-each-copy-as-done", EXACTLY_ONCE, "strategies/sandblaster/evaluating.py",
        "        if self._done[number]:\n"
        "            return False\n"
        "        self._done[number] = 1\n", "        self._done[number] = 1\n",
        ("tests/core/test_work_units.py::test_whatever_happens_everything_is_done_once",)),
    Mutant("a-work-unit-is-of-one-part-only", EXACTLY_ONCE, "strategies/sandblaster/shard.py",
        "vectors.contribute(payload, self._into[part])", "vectors.contribute(payload, self._into[0])",
        (f"{MACHINE}::test_parts_of_a_batch_are_summed_apart",)),
    Mutant("work-units-are-summed-as-they-come", BITS, "strategies/sandblaster/shard.py",
        "        if self._ordered and number != self._next:\n", "        if False:\n",
        (f"{MACHINE}::test_in_order_the_sum_has_the_same_bits",)),
    Mutant("a-loss-is-summed-as-it-comes", BITS, "strategies/sandblaster/evaluating.py",
        "loss = math.fsum(self._losses.values())", "loss = sum(self._losses.values())",
        (SWEEP,), seconds=15),
    Mutant("an-answer-is-given-before-the-standby-has-it", STANDBY, "strategies/sandblaster/shard.py",
        "effects += mirror.after([Send(sender, answer)] if answers else [])",
        "effects += [Send(sender, answer)] if answers else []",
        (f"{MACHINE}::test_a_shard_says_nothing_that_its_standby_does_not_hold",)),
    Mutant("a-standby-does-not-know-what-is-in-the-sum", STANDBY, "strategies/sandblaster/shard.py",
        "tuple(sorted(self._taken)), self._next)", "(), self._next)",
        (f"{MACHINE}::test_an_heir_is_as_far_as_its_shard_whenever_its_standby_has_come",)),
    Mutant("what-waits-for-its-turn-is-not-sent-to-the-standby", STANDBY, "strategies/sandblaster/shard.py",
        "for number, (kept, part) in self._early.items()]", "for number, (kept, part) in ()]",
        (f"{STANDBYS}::test_a_standby_that_comes_in_the_midst_of_an_evaluation_is_sent_what_waits_for_its_turn",)),
    Mutant("an-operation-that-is-told-again-is-done-again", STANDBY, "strategies/sandblaster/shard.py",
        "        if event.number <= self._newest.number:  # repeated",
        "        if event.number < self._newest.number:  # repeated",
        (f"{STANDBYS}::test_whenever_a_shard_dies_nobody_goes_back_and_the_bits_are_those_of_calm",)),
    Mutant("a-shard-sends-its-parameters-with-its-scalars", NO_VECTOR, "strategies/sandblaster/shard.py",
        "effects += mirror.after([Send(sender, answer)] if answers else [])",
        "effects += mirror.after([Send(sender, answer, self.measured(shard))] if answers else [])",
        (f"{ORACLES}::test_no_vector_leaves_its_shard_but_parameters_to_replicas_and_gradients_from_them",)),
]  # fmt: skip
