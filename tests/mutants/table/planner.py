"""Mutants of costs and plans: what is priced, what is held, and which trials count."""

from mutants import Mutant

COSTED = "`cost` counts parameters and multiply-adds"
PRICED = "The price of a candidate of `plan`"
RANKED = "A plan tells of every candidate"
CTRL_C = "A Ctrl-C at any moment of the command ends it"
CORRECTED = "A plan is corrected by trials"
PLANS = "tests/core/test_plans.py::"
COSTS = "tests/core/test_costs.py::"

MUTANTS = [
    Mutant(
        "a-batch-norm-that-refuses-one-sample-ends-a-cost", COSTED, "costs/cost.py",
        "        return str(error)\n", "        raise\n",
        (COSTS + "test_a_minibatch_that_a_model_refuses_is_left_out_or_told_and_no_largest_batch_is_looked_for_below",),
    ),
    Mutant(
        "a-larger-batch-fits", COSTED, "costs/cost.py",
        "    return low\n", "    return high\n",
        (COSTS + "test_the_largest_batch_fits_and_one_more_sample_does_not",),
    ),
    Mutant(
        "the-last-minibatch-of-an-epoch-costs-as-much-as-a-whole-one", COSTED, "costs/cost.py",
        "last=profile.at(last, ", "last=profile.at(batch_size, ",
        (COSTS + "test_epochs_cost_their_minibatches_the_last_one_what_it_has",),
    ),
    Mutant(
        "an-update-is-timed-with-as-many-threads-as-torch-has", COSTED, "costs/updates.py",
        "    with one_thread(), torch.no_grad():\n", "    with torch.no_grad():\n",
        (COSTS + "test_an_update_is_timed_with_one_thread_as_a_replica_makes_it",),
    ),
    Mutant(
        "a-model-that-has-to-compute-computes-what-is-asked", COSTED, "costs/trace.py",
        "        if not self._fakes:\n            low",
        "        if not self._fakes and not batch_size:\n            low",
        (COSTS + "test_what_is_asked_of_a_model_that_has_to_compute_is_continued_from_two_small_minibatches",),
    ),
    Mutant(
        "what-the-kernel-takes-for-memory-lies-on-the-line", COSTED, "costs/profile.py",
        "(getattr(point, name) - kernel[name])", "getattr(point, name)",
        (COSTS + "test_what_the_kernel_takes_for_memory_is_no_part_of_the_line",),
    ),
    Mutant(
        "a-convolution-lays-nothing-out", COSTED, "costs/trace.py",
        "*zip(self.kinds, self.sizes, strict=True), *self.work)", "*zip(self.kinds, self.sizes, strict=True),)",
        (COSTS + "test_memories_of_32_mb_are_the_kernels_with_those_in_which_convolutions_lay_out",),
    ),
    Mutant(
        "an-update-on-a-device-is-timed-by-the-thread", COSTED, "costs/updates.py",
        "clock_of(device), time", 'clock_of("cpu"), time',
        (COSTS + "test_an_update_on_a_device_is_timed_by_its_events",),
    ),
    Mutant(
        "a-recurrent-layer-multiplies-the-weights-of-one-direction", COSTED, "costs/trace.py",
        'if name.startswith("weight"))', 'if name.startswith("weight") and "reverse" not in name)',
        (COSTS + "test_a_recurrent_layer_multiplies_all_its_weights_in_each_step",),
    ),
    Mutant(
        "a-straggler-spares-nothing", PRICED, "planner/pricing.py",
        "spared.get(STRAGGLER, 0.0) + max(0.0, late)", "spared.get(STRAGGLER, 0.0)",
        (PLANS + "test_a_straggler_binds_where_the_others_wait_for_it_and_is_told_where_it_is_gone",),
    ),
    Mutant(
        "who-shares-a-host-pays-for-messages-to-the-shard", PRICED, "planner/pricing.py",
        "    if direct:\n", "    if direct and not several:\n",
        (PLANS + "test_who_updates_memory_of_one_host_pays_what_that_was_measured_to_cost",),
    ),
    Mutant(
        "gradients-are-part-of-what-trips-beside-them-cost", PRICED, "planner/trips.py",
        "    trainer.compute(Batch(0, index % trainer.order.batches))\n    start = kind.clock()",
        "    start = kind.clock()\n    trainer.compute(Batch(0, index % trainer.order.batches))",
        ("tests/processes/test_plan.py::test_what_a_trip_costs_is_not_what_computing_beside_it_takes",),
    ),
    Mutant(
        "one-home-computes-for-all", PRICED, "planner/pricing.py",
        "return step / whole * sum(", "return step / whole * max(",
        (PLANS + "test_a_split_model_takes_the_time_of_its_schedule_on_the_virtual_cluster",),
    ),
    Mutant(
        "a-simulated-partition-updates-in-no-time", PRICED, "places/simulated/timed.py",
        "            step = stopwatch.draw()\n            if timing.more:",
        "            step = stopwatch.draw()\n            if timing.more < 0:",
        (PLANS + "test_each_home_of_a_split_model_updates_its_part_and_messages_cost_it_time",),
    ),
    Mutant(
        "a-few-steps-count-what-lies-between-them-too-often", PRICED, "planner/pricing.py",
        "between = max(1, count - 1)", "between = count",
        (PLANS + "test_a_few_steps_have_the_price_of_many",),
    ),
    Mutant(
        "cores-do-not-slow-each-other-down", PRICED, "planner/pricing.py",
        "together=together if machines.cores > 1 else 1.0", "together=1.0",
        (PLANS + "test_cores_that_slow_each_other_down_make_a_step_longer",),
    ),
    Mutant(
        "gradients-beside-others-that-wait-are-as-short-as-any", PRICED, "planner/pricing.py",
        "cluster.step * cluster.lockstep_of(candidate).gradient", "cluster.step",
        (PLANS + "test_steps_that_took_longer_than_their_price_are_priced_so_by_gradients_and_messages",),
    ),
    Mutant(
        "of-each-kind-the-most-processes-are-tried", PRICED, "planner/lockstep.py",
        "first.setdefault(one.kind, one)", "first[one.kind] = one",
        (PLANS + "test_who_waits_is_tried_once_for_each_kind_by_the_fewest_processes",),
    ),
    Mutant(
        "who-waits-is-tried-on-a-busy-machine", PRICED, "planner/plan.py",
        "here.step > LONGEST_STEP or here.busy:", "here.step > LONGEST_STEP:",
        (PLANS + "test_nobody_is_tried_on_a_busy_machine_or_one_too_small_or_beside_long_steps",),
    ),
    Mutant(
        "what-does-not-fit-is-first", RANKED, "planner/plan.py",
        "if limit is not None and needs[largest] > limit:", "if limit is not None and needs[largest] < 0:",
        (PLANS + "test_what_does_not_fit_is_a_row_with_its_reason",),
    ),
    Mutant(
        "what-this-machine-cannot-hold-is-run", RANKED, "planner/plan.py",
        "    if needs <= left:\n", "    if needs > 0:\n",
        (PLANS + "test_what_this_machine_cannot_hold_is_not_run_but_the_next_is",),
    ),
    Mutant(
        "the-slowest-is-first", RANKED, "planner/plan.py",
        "-(row.terms.samples_per_second if row.terms else 0.0),",
        "(row.terms.samples_per_second if row.terms else 0.0),",
        (PLANS + "test_parts_of_a_step_add_up_and_the_first_is_the_fastest",),
    ),
    Mutant(
        "partitions-of-a-replica-are-on-several-hosts", RANKED, "planner/candidates.py",
        "hosts * (machines.cores // partitions)", "hosts * machines.cores // partitions",
        (PLANS + "test_candidates_are_powers_of_two_and_all_cores",),
    ),
    Mutant(
        "a-partition-holds-no-state-of-the-optimizer", RANKED, "planner/candidates.py",
        "(vectors + 1) * own + state + passing", "(vectors + 1) * own + passing",
        (PLANS + "test_a_partition_holds_the_vectors_of_its_part_alone",),
    ),
    Mutant(
        "trials-of-another-machine-count", CORRECTED, "planner/plan.py",
        "if one.machine == trials.this_kind()]", "if one.machine]",
        (PLANS + "test_other_machines_are_corrected_by_no_trial_of_this_one",),
    ),
    Mutant(
        "trials-of-another-optimizer-count", CORRECTED, "planner/trials.py",
        "one.alike == alike]", "one.alike == alike._replace(optimizer=one.optimizer)]",
        (PLANS + "test_trials_of_another_optimizer_or_of_split_replicas_correct_nothing",),
    ),
    Mutant(
        "trials-of-an-optimizer-with-other-options-count", CORRECTED, "planner/plan.py",
        "trials.stepped(optimizer), row.command", "optimizer.name, row.command",
        (PLANS + "test_trials_of_another_optimizer_or_of_split_replicas_correct_nothing",),
    ),
    Mutant(
        "a-plan-that-is-interrupted-leaves-a-file", CORRECTED, "planner/trials.py",
        "    for one in missing:\n", "    for one in missing[:0]:\n",
        (PLANS + "test_a_trial_that_is_interrupted_ends_the_plan_and_keeps_nothing",),
    ),
    Mutant(
        "a-trial-of-a-plan-is-interrupted-as-a-job", CTRL_C, "planner/trials.py",
        "        except Interrupted:  # before", "        except InterruptedError:  # before",
        (PLANS + "test_a_trial_that_is_interrupted_ends_the_plan_and_keeps_nothing[False]",),
    ),
    Mutant(
        "a-trial-of-a-plan-that-is-interrupted-late-leaves-its-folder", CTRL_C, "planner/trials.py",
        "        if self._raises:\n", "        if self._came:\n",
        (PLANS + "test_a_trial_that_is_interrupted_at_any_moment_leaves_no_folder[rmtree]",),
    ),
    Mutant(
        "a-price-of-a-plan-is-interrupted-as-a-job", CTRL_C, "planner/pricing.py",
        "        raise KeyboardInterrupt from None\n", "        raise\n",
        (PLANS + "test_a_price_that_is_interrupted_is_no_job_that_has_not_begun",),
    ),
    Mutant(
        "who-measures-for-nobody-tells-why-it-failed", CTRL_C, "places/processes/peers.py",
        "        if not _left_alone(connection):\n", "        if not connection.closed:\n",
        ("tests/processes/test_plan.py::test_a_peer_that_fails_since_nobody_is_there_any_more_tells_nobody",),
    ),
    Mutant(
        "what-a-busy-machine-did-is-kept", CORRECTED, "planner/plan.py",
        "    if kept and here.busy:", "    if kept and not here.busy and here.busy:",
        (PLANS + "test_what_is_measured_on_a_busy_machine_is_not_kept",),
    ),
    Mutant(
        "a-correction-is-corrected-again", CORRECTED, "planner/plan.py",
        "and (predicted := priced[row.what]) is not None", "and (predicted := row.terms) is not None",
        (PLANS + "test_the_best_are_run_and_later_plans_are_corrected_by_what_was_seen",),
    ),
]  # fmt: skip
