"""Mutants of options: what would do nothing is taken without a word, or what is asked for is not done."""

from mutants import Mutant

OPTIONS = "Every option changes what a job does"
REFUSED = "tests/core/test_idle_options.py::test_what_would_do_nothing_is_refused_with_the_reason"
PLAYED = "tests/simulated/test_options.py::test_no_option_of_a_strategy_is_dead"

MUTANTS = [
    Mutant(
        "a-history-is-taken-where-there-is-none",
        OPTIONS,
        "core/descent.py",
        "if self.history != Descent().history and self.method",
        "if self.history < 1 and self.method",
        (f"{REFUSED}[train digits sandblaster --method cg --history 5]",),
    ),
    Mutant(
        "who-is-on-one-host-is-told-to-nobody",
        OPTIONS,
        "schedules/allreduce.py",
        "if per_host and not (algorithm.startswith(HIERARCHICAL) or",
        "if per_host and algorithm == HIERARCHICAL and not (algorithm.startswith(HIERARCHICAL) or",
        (f"{REFUSED}[simulate digits allreduce --per-host 2 --algorithm ring]", f"{REFUSED}[draw ring --per-host 2]"),
    ),
    Mutant(
        "hogwild-clips-nothing",
        OPTIONS,
        "cluster/hogwild.py",
        "job.seed, settings.clip_norm, settings.drop_last)",
        "job.seed, 0.0, settings.drop_last)",
        (f"{PLAYED}[hogwild clip_norm]",),
    ),
    Mutant(
        "buckets-of-real-replicas-are-of-one-size",
        OPTIONS,
        "strategies/allreduce/torch_whole.py",
        "found = buckets(layout, plan.settings.bucket_mb)",
        "found = buckets(layout, 25.0)",
        ("tests/processes/test_knobs.py::test_smaller_buckets_are_more_of_them[tcp]",),
        seconds=15,
    ),
    Mutant(
        "a-short-minibatch-is-dealt-with-drop-last",
        OPTIONS,
        "server/admission.py",
        "left_out = event.samples % settings.batch_size if settings.drop_last else 0",
        "left_out = 0",
        ("tests/simulated/test_drop_last.py::test_what_is_left_out_is_not_counted",),
    ),
    Mutant(
        "replicas-may-differ-in-what-is-left-out",
        OPTIONS,
        "server/admission.py",
        "(samples := plan.samples + plan.left_out)",
        "(samples := plan.samples)",
        ("tests/simulated/test_drop_last.py::test_one_replica_is_sgd_without_the_short_minibatch",),
    ),
]
