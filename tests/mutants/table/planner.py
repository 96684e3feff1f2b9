"""Mutants of costs and plans: what is priced, what is held, and which trials count."""

from mutants import Mutant

COSTED = "`cost` counts parameters and multiply-adds"
PRICED = "The price of a candidate of `plan`"
RANKED = "A plan tells of every candidate"
CORRECTED = "A plan is corrected by trials"
PLANS = "tests/core/test_plans.py::"
COSTS = "tests/core/test_costs.py::"

MUTANTS = [
    Mutant(
        "a-larger-batch-fits",
        COSTED,
        "costs/cost.py",
        "    return low\n",
        "    return high\n",
        (COSTS + "test_the_largest_batch_fits_and_one_more_sample_does_not",),
    ),
    Mutant(
        "the-last-minibatch-of-an-epoch-costs-as-much-as-a-whole-one",
        COSTED,
        "costs/cost.py",
        "self.profile.at(left).step",
        "self.profile.at(self.batch_size).step",
        (COSTS + "test_epochs_cost_their_minibatches_the_last_one_what_it_has",),
    ),
    Mutant(
        "who-shares-a-host-pays-for-messages-to-the-shard",
        PRICED,
        "planner/pricing.py",
        "    if direct:\n",
        "    if direct and not several:\n",
        (PLANS + "test_who_updates_memory_of_one_host_pays_what_that_was_measured_to_cost",),
    ),
    Mutant(
        "gradients-are-part-of-what-trips-beside-them-cost",
        PRICED,
        "planner/trips.py",
        "    trainer.compute(Batch(0, index % trainer.order.batches))\n    start = kind.clock()",
        "    start = kind.clock()\n    trainer.compute(Batch(0, index % trainer.order.batches))",
        ("tests/processes/test_plan.py::test_what_a_trip_costs_is_not_what_computing_beside_it_takes",),
    ),
    Mutant(
        "one-home-computes-for-all",
        PRICED,
        "planner/pricing.py",
        "return cluster.step / whole * sum(",
        "return cluster.step / whole * max(",
        (PLANS + "test_a_split_model_takes_the_time_of_its_schedule_on_the_virtual_cluster",),
    ),
    Mutant(
        "a-simulated-partition-updates-in-no-time",
        PRICED,
        "places/simulated/timed.py",
        "            step = stopwatch.draw()\n            if timing.more:",
        "            step = stopwatch.draw()\n            if timing.more < 0:",
        (PLANS + "test_each_home_of_a_split_model_updates_its_part_and_messages_cost_it_time",),
    ),
    Mutant(
        "a-few-steps-count-what-lies-between-them-too-often",
        PRICED,
        "planner/pricing.py",
        "between = max(1, count - 1)",
        "between = count",
        (PLANS + "test_a_few_steps_have_the_price_of_many",),
    ),
    Mutant(
        "cores-do-not-slow-each-other-down",
        PRICED,
        "planner/pricing.py",
        "together=together if machines.cores > 1 else 1.0",
        "together=1.0",
        (PLANS + "test_cores_that_slow_each_other_down_make_a_step_longer",),
    ),
    Mutant(
        "what-does-not-fit-is-first",
        RANKED,
        "planner/plan.py",
        "if limit is not None and needs[largest] > limit:",
        "if limit is not None and needs[largest] < 0:",
        (PLANS + "test_what_does_not_fit_is_a_row_with_its_reason",),
    ),
    Mutant(
        "what-this-machine-cannot-hold-is-run",
        RANKED,
        "planner/plan.py",
        "    if needs <= left:\n",
        "    if needs > 0:\n",
        (PLANS + "test_what_this_machine_cannot_hold_is_not_run_but_the_next_is",),
    ),
    Mutant(
        "the-slowest-is-first",
        RANKED,
        "planner/plan.py",
        "-(row.terms.samples_per_second if row.terms else 0.0),",
        "(row.terms.samples_per_second if row.terms else 0.0),",
        (PLANS + "test_parts_of_a_step_add_up_and_the_first_is_the_fastest",),
    ),
    Mutant(
        "partitions-of-a-replica-are-on-several-hosts",
        RANKED,
        "planner/candidates.py",
        "hosts * (machines.cores // partitions)",
        "hosts * machines.cores // partitions",
        (PLANS + "test_candidates_are_powers_of_two_and_all_cores",),
    ),
    Mutant(
        "a-partition-holds-no-state-of-the-optimizer",
        RANKED,
        "planner/candidates.py",
        "(vectors + 1) * own + state + passing",
        "(vectors + 1) * own + passing",
        (PLANS + "test_a_partition_holds_the_vectors_of_its_part_alone",),
    ),
    Mutant(
        "trials-of-another-machine-count",
        CORRECTED,
        "planner/plan.py",
        "if one.machine == trials.this_kind()]",
        "if one.machine]",
        (PLANS + "test_other_machines_are_corrected_by_no_trial_of_this_one",),
    ),
    Mutant(
        "what-a-busy-machine-did-is-kept",
        CORRECTED,
        "planner/plan.py",
        "    if kept and here.busy:",
        "    if kept and not here.busy and here.busy:",
        (PLANS + "test_what_is_measured_on_a_busy_machine_is_not_kept",),
    ),
    Mutant(
        "a-correction-is-corrected-again",
        CORRECTED,
        "planner/plan.py",
        "if row.measured is not None and (predicted := priced[row.what]) is not None",
        "if row.measured is not None and (predicted := row.terms) is not None",
        (PLANS + "test_the_best_are_run_and_later_plans_are_corrected_by_what_was_seen",),
    ),
]
