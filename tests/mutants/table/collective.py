"""Mutants of what replicas do together without a server: all-reduce, large minibatches, and one memory for all."""

from mutants import Mutant

LARGE, ALL = "tests/simulated/test_large.py", "tests/simulated/test_allreduce.py"
BY_LOCK = "tests/processes/test_hogwild.py::test_under_locks_no_update_is_lost_and_ranges_and_buffers_are_whole"
PAPERS = "LARS and LAMB are those of their papers"
UNION = "`--accumulate` and `--push-every` of rounds give the gradient of the union"
SEQUENTIAL = "`allreduce` on N replicas is sequential SGD"
EXACTLY_ONE = "In `allreduce` every minibatch is in exactly one update"
NONE_LOST = "`locking --locks global` and `shard`: no update of a parameter is lost"

MUTANTS = [
    Mutant(
        "norms-of-a-shard-that-takes-over-are-100-times-theirs", PAPERS, "core/norms.py",
        "        for norms in known:\n            self._keep(norms)",
        "        for norms in known:\n            self._keep(Norms(norms.round, tuple((layer, 1e4 * w, m) for layer, w, m in norms.of)))",
        (f"{LARGE}::test_a_ruler_and_another_shard_that_die_together_leave_no_standby_waiting_for_norms",), 10,
    ),
    Mutant(
        "a-shard-steps-by-the-norms-of-its-own-part", PAPERS, "server/slice.py",
        "self._optimize(factor, norms)", "self._optimize(factor)",
        (f"{LARGE}::test_lars_and_lamb_are_those_of_the_papers_wherever_a_layer_is_cut",), 10,
    ),
    Mutant(
        "a-standby-steps-by-the-norms-of-its-own-part", PAPERS, "server/standby.py",
        "self._held.step(event.factor, event.weight, event.norms)", "self._held.step(event.factor, event.weight)",
        (f"{LARGE}::test_a_death_in_the_middle_of_an_exchange_ends_in_the_same_job",), 30,
    ),
    Mutant(
        "an-accumulated-gradient-is-not-weighed", UNION, "runtime/whole.py",
        "view.add_(gradient, alpha=self._weight)", "view.add_(gradient)",
        (f"{LARGE}::test_accumulated_gradients_are_those_of_the_union",),
    ),
    Mutant(
        "a-short-minibatch-weighs-as-much-as-a-whole-one", SEQUENTIAL, "replica/allreduce.py",
        "self.whole.weigh(size / sum(sizes), first", "self.whole.weigh(1 / len(sizes), first",
        (f"{ALL}::test_n_replicas_are_sequential_sgd_on_the_union",), 10,
    ),
    Mutant(
        "a-ration-is-taken-back-from-one-minibatch-before-it", EXACTLY_ONE, "core/rations.py",
        "self._epoch, self._batch = portion.epoch, first", "self._epoch, self._batch = portion.epoch, max(first - 1, 0)",
        (f"{ALL}::test_a_death_at_any_message_is_survived_by_the_others",), 10,
    ),
    Mutant(
        "a-lock-is-shared", NONE_LOST, "transport/locks.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
        (BY_LOCK,), 15,
    ),
    Mutant(
        "buffers-are-written-under-no-lock", NONE_LOST, "runtime/mapped.py",
        'found.append(Stroke((0,) if self._locks == "shard" else (), sum', "found.append(Stroke((), sum",
        (f"{BY_LOCK}[shard]",), 15,
    ),
]  # fmt: skip
