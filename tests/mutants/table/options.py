"""Mutants of options: what would do nothing is taken without a word, or what is asked for is not done."""

from mutants import Mutant

PLANS = "tests/core/test_plans.py"
TWICE = "test_a_straggler_or_a_network_that_cannot_be_is_refused_before_anything_is_measured"
OPTIONS = "options"
REFUSED = "tests/core/test_idle_options.py::test_what_would_do_nothing_is_refused_with_the_reason"
TYPED = "typed-values"
TOLD = "task-errors"
VALUES = "tests/core/test_values.py"
WRONG = "tests/simulated/test_wrong.py::test_what_can_be_known_is_told_before_the_first_step"
PLAYED = "tests/simulated/test_options.py::test_no_option_of_a_strategy_is_dead"

MUTANTS = [
    Mutant("one-wrong-option-hides-the-others", OPTIONS, "job.py",
        "return list(errors.values())", "return list(errors.values())[:1]",
        ("tests/core/test_cli.py::test_all_that_a_job_cannot_have_is_said_at_once",)),
    Mutant("the-command-line-checks-a-job-before-its-place-does", OPTIONS, "job.py",
        "    each = itertools", "    _ = list(settings.checks())\n    each = itertools",
        ("tests/core/test_cli.py::test_a_first_line_says_at_once_what_is_begun_and_a_job_is_checked_once",)),
    Mutant("a-word-of-the-field-is-only-spelled-alike", OPTIONS, "errors.py",
        'return synonym(word, known) or "".join(', 'return "".join(',
        ("tests/core/test_cli.py::test_a_wrong_word_is_one_line_with_the_right_one",
         "tests/core/test_cli.py::test_a_file_of_options_that_is_wrong_names_file_line_and_nearest_word")),
    Mutant("of-a-key-that-stands-there-twice-the-last-counts", OPTIONS, "cli/words.py",
        "    if name in fields:\n", "    if name in fields and not fields:\n",
        (f"{PLANS}::{TWICE}[words4---network latency=: is given twice; leave one off]",)),
    Mutant("a-history-is-taken-where-there-is-none", OPTIONS, "strategies/sandblaster/settings.py",
        "if self.history != type(self).history and self.method", "if self.history < 1 and self.method",
        (f"{REFUSED}[train digits sandblaster --method cg --history 5]",)),
    Mutant("hogwild-clips-nothing", OPTIONS, "strategies/parameter_server/players.py",
        "context.computes(context.settings.clip_norm)", "context.computes(0.0)",
        (f"{PLAYED}[hogwild clip_norm]",)),
    Mutant("buckets-of-real-replicas-are-of-one-size", OPTIONS, "strategies/grouped/whole.py",
        "trained_buckets = buckets(layout, options.bucket_mb, partition)", "trained_buckets = buckets(layout, 25.0)",
        ("tests/machines/test_reducing.py::test_a_replica_adds_up_in_buckets_of_the_size_that_is_asked_for",)),
    Mutant("a-short-minibatch-is-dealt-with-drop-last", OPTIONS, "coordination/admission.py",
        "left_out = event.samples % settings.batch_size if settings.drop_last else 0", "left_out = 0",
        ("tests/simulated/test_drop_last.py::test_what_is_left_out_is_not_counted",)),
    Mutant("replicas-may-differ-in-what-is-left-out", OPTIONS, "coordination/admission.py",
        "(all_samples := plan.samples + plan.left_out or STREAM)", "(all_samples := plan.samples or STREAM)",
        ("tests/simulated/test_drop_last.py::test_one_replica_is_sgd_without_the_short_minibatch",)),
    Mutant("a-field-holds-whatever-it-is-given", TYPED, "core/values.py",
        'raise UsageError(f"{where}: must be {_names(kinds)}, not {_article(type(value).__name__)}")', "return value",
        (f"{VALUES}::test_a_value_of_a_wrong_type_is_refused_at_the_door[a latency with its unit]",)),
    Mutant("what-stands-for-a-value-stays-what-it-was", TYPED, "core/values.py",
        "        if held is value:\n", "        if held == value:\n",
        (f"{VALUES}::test_what_stands_for_a_value_becomes_it",)),
    Mutant("a-test-set-is-tried-after-an-epoch", TOLD, "strategies/cast.py",
        "        check_measure(self.task, vectors.module)\n", "",
        (f"{WRONG}[downpour-a metric in words]",)),
    Mutant("a-dead-evaluator-is-waited-for", TOLD, "coordination/coordinator.py",
        '{then}")), *self.deal(), *self.close()]', '{then}")), *self.close()]',
        ("tests/machines/test_coordinator.py::test_nothing_is_dealt_before_the_evaluator_has_come_or_is_gone",)),
    Mutant("batch-norm-of-one-sample-is-found-at-the-end-of-the-epoch", TOLD, "tasks/worker.py",
        "            self._check_one()\n", "            pass\n",
        ("tests/simulated/test_drop_last.py::test_batch_norm_and_a_last_minibatch_of_one_sample",)),
    Mutant("trying-one-sample-changes-the-statistics", TOLD, "tasks/worker.py",
        "torch.func.functional_call(self.model, kept, (on_device(inputs, self._device),))",
        "self.model(on_device(inputs, self._device))",
        ("tests/simulated/test_drop_last.py::test_trying_one_sample_leaves_the_statistics_alone",)),
]  # fmt: skip
