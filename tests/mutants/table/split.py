"""Mutants of split models: what each home computes, and what crosses between homes."""

from mutants import Mutant

STAGES, LAYERS = "tests/machines/test_split_stages.py", "tests/machines/test_split_layers.py"
WAYS, MODELS = "tests/machines/test_split_ways.py", "tests/machines/test_split_models.py"
EQUAL = "A split model is the whole one"
BITS = "In stages, with one microbatch, a split model is the whole one bit for bit"
CROSSES = "Only what must cross crosses"
CHOSEN = "`auto` takes the way with the least price"
PREDICTED = "What `split` predicts is the price of what was timed"
CHOOSING, COSTS = "tests/machines/test_split_choosing.py", "tests/core/test_split_costs.py"
TRACED = "A model is traced for any number of samples"
CHANCE = "What draws at random in a split model draws the same however it is split"
MICROBATCHES = "Microbatches of any sizes give the gradient of the minibatch"
EVALUATING, EVALUATED = (
    "tests/processes/test_partitions.py::test_who_measures_a_split_model_has_none_of_it_in_memory_of_its_own",
    "Who measures a model of which replicas hold parts",
)
BUILDING, BUILT = "tests/machines/test_on_disk.py", "A partition builds and holds its own part only"
MOVED = "tests/machines/test_devices.py"
WEIGHTS, ONCE = "tests/machines/test_split_weights.py", "With `--weight-gradients once` one product"
SCRIPTS, SCRIPTED = "tests/machines/test_split_scripts.py", "A script's split model is the whole one"
OWN = "The split that a task brings is taken wherever none is named"
PARTITIONS, REFUSED = "tests/processes/test_partitions.py", "A split that the model of a task cannot have is refused"


MUTANTS = [
    Mutant(
        "a-partition-waits-for-ever-for-one-whose-link-is-gone",
        "Partitions whose link breaks while both live do not wait for each other for ever", "replica/siblings.py",
        "return [Wake(PARTED_SECONDS, PartedOver(role)) for role in new]", "return []",
        ("tests/simulated/test_partitions.py::test_partitions_whose_link_breaks_while_both_live_do_not_wait_for_ever",),
    ),
    Mutant(
        "a-gradient-is-made-where-one-of-this-step-is", ONCE, "split/weights.py",
        "            room = None  # another", "            pass  # another",
        (f"{WEIGHTS}::test_gradients_are_made_where_those_of_the_last_step_were[2]",),
    ),
    Mutant(
        "each-step-of-a-job-has-new-memory-for-its-gradients", ONCE, "strategies/partition.py",
        "self.way.order(count), self._rooms)", "self.way.order(count), {})",
        (f"{WEIGHTS}::test_the_steps_of_a_partition_make_gradients_where_those_of_the_last_were",),
    ),
    Mutant(
        "each-step-has-new-memory-for-its-gradients", ONCE, "split/weights.py",
        "        rooms.setdefault(weight, made)\n", "",
        (f"{WEIGHTS}::test_gradients_are_made_where_those_of_the_last_step_were[1]",),
    ),
    Mutant(
        "nobody-says-that-a-split-is-the-task-s", OWN, "split/plan.py",
        "    with blamed_on_task(split.own):\n", '    with blamed_on_task(""):\n',
        (f"{PARTITIONS}::test_a_split_that_a_task_brings_is_refused_before_a_process_is_started",),
    ),
    Mutant(
        "what-crosses-has-any-shape", TRACED, "replica/home_part.py",
        "if given.direction is Pass.FORWARD and given", "if given.direction is Pass.WEIGHTS and given",
        (f"{PARTITIONS}::test_what_crosses_in_another_shape_than_its_samples_have_ends_the_job_with_the_remedy",),
    ),
    Mutant(
        "a-number-of-the-example-is-that-of-every-call", TRACED, "split/tidying.py",
        "(isinstance(one, float | None) and one == other)", "isinstance(one, float | None)",
        (f"{MODELS}::test_a_number_of_samples_is_that_of_each_call",),
    ),
    Mutant(
        "what-two-numbers-of-samples-show-holds-for-every-other", TRACED, "split/tidying.py",
        'sums = name in _SUMS or (name == "mul" and len(counts) == 1)', "sums = True",
        (f"{MODELS}::test_a_number_of_samples_is_that_of_each_call",),
    ),
    Mutant(
        "a-number-of-values-is-that-of-the-example", TRACED, "split/tidying.py",
        "numbers = self._observed.real and any(", "numbers = not self._observed and any(",
        (f"{MODELS}::test_a_number_beside_tensors_is_computed_where_it_is_used_and_never_that_of_the_example",),
    ),
    Mutant(
        "an-export-holds-for-one-number-of-samples", TRACED, "split/tracing.py",
        "torch.export.Dim.DYNAMIC if", "torch.export.Dim.AUTO if",
        (f"{MODELS}::test_a_number_of_samples_that_is_taken_for_that_of_the_example_is_refused",),
    ),
    Mutant(
        "a-part-computes-with-its-own-number-of-samples", EQUAL, "split/ways/samples.py",
        " or counts or ", " or ",
        (f"{WAYS}::test_what_cannot_be_split_by_samples_is_refused",),
    ),
    Mutant(
        "how-far-partitions-are-is-kept-from-who-waits", REFUSED, "record/live.py",
        "self._summary.started is None and now - self._last >= PERIOD", "not self._built",
        ("tests/core/test_record_live.py::test_partitions_that_build_their_parts_for_long_say_how_many_have",),
    ),
    Mutant(
        "a-job-forgets-the-split-of-its-task", OWN, "strategies/partition.py",
        "settings.chunks, task.split)", "settings.chunks)",
        ("tests/simulated/test_partitions.py::test_a_task_brings_a_split_of_its_own",),
    ),
    Mutant(
        "a-prediction-forgets-the-split-of-its-task", OWN, "places/prediction/split_model.py",
        ", own=task.split)", ")",
        (
            "tests/processes/test_predict.py::"
            "test_partitions_answer_by_the_split_that_a_task_brings_where_none_is_named",
        ),
    ),
    Mutant(
        "a-plan-forgets-the-split-of-its-task", OWN, "planner/plan.py",
        ", own=task.split)", ")",
        ("tests/core/test_plans.py::test_the_split_that_a_task_brings_is_priced",),
    ),
    Mutant(
        "a-price-forgets-the-split-of-its-task", OWN, "cli/commands.py",
        "asked.chunks, made.split)", "asked.chunks)",
        ("tests/core/test_plans.py::test_the_split_that_a_task_brings_is_priced",),
    ),
    Mutant(
        "a-split-is-tried-by-replicas-only", REFUSED, "places/processes/requirements.py",
        "        partition.check_model(task, settings)\n", "        assert partition\n",
        (f"{PARTITIONS}::test_a_split_that_a_model_cannot_have_is_refused_before_a_process_is_started",),
    ),
    Mutant(
        "a-model-without-values-has-the-last-word", REFUSED, "strategies/partition.py",
        "        except Exception:  # whatever a model raises that has no values\n",
        "        except ZeroDivisionError:\n",
        (f"{PARTITIONS}::test_what_only_replicas_can_build_is_left_to_them",),
    ),
    Mutant(
        "more-shards-than-parameters-are-started", REFUSED, "strategies/partition.py",
        "check_shards(settings.shards, sum(", "check_shards(1, sum(",
        (f"{PARTITIONS}::test_more_than_sixteen_shards_are_held_against_the_parameters",),
    ),
    Mutant(
        "chunks-are-alike-where-the-layers-above-work-longer", EQUAL, "split/ways/time.py",
        "    if growth == 1.0:\n", "    if growth:\n",
        ("tests/machines/test_split_ways.py::test_chunks_grow_where_the_layers_above_work_longer[5-2-1]",),
    ),
    Mutant(
        "a-bias-is-added-at-each-home", EQUAL, "split/ways/neurons.py",
        "if home == 0 and layer.bias is not None:  # it is added once", "if layer.bias is not None:",
        (f"{LAYERS}::test_a_divided_model_is_the_whole_one",),
    ),
    Mutant(
        "a-gradient-that-comes-back-takes-the-place-of-one-that-is-there", EQUAL, "split/play.py",
        "total = gradient if total is None or gradient is None else total + gradient", "total = gradient",
        (f"{STAGES}::test_what_skips_goes_from_its_producer_to_each_home_once",),
    ),
    Mutant(
        "padding-of-a-region-is-zero-under-a-largest-value-too", EQUAL, "split/ways/regions.py",
        'fill = float("-inf") if', "fill = 0.0 if",
        (f"{WAYS}::test_regions_are_the_whole_model",),
    ),
    Mutant(
        "a-chunk-begins-with-no-state", EQUAL, "split/ways/time.py",
        "(flow,) if state is None else (flow, state)", "(flow,)",
        (f"{WAYS}::test_time_is_the_whole_model",),
    ),
    Mutant(
        "a-copy-of-a-sample-counts", EQUAL, "split/ways/samples.py",
        "return made if len(made) == samples else made[:samples]", "return made",
        (f"{WAYS}::test_samples_are_the_whole_model_also_where_a_home_has_none",),
    ),
    Mutant(
        "a-norm-is-of-a-part-of-the-minibatch", EQUAL, "split/ways/samples.py",
        "return layer.training or layer.running_mean is None", "return False",
        (f"{WAYS}::test_what_cannot_be_split_by_samples_is_refused",),
    ),
    Mutant(
        "each-part-drops-what-the-first-drops", CHANCE, "split/ways/samples.py",
        "DroppedPart(layer.p, (number, self._parts))", "DroppedPart(layer.p, (0, self._parts))",
        (f"{WAYS}::test_samples_drop_what_a_model_in_stages_drops",),
    ),
    Mutant(
        "tied-weights-are-two", EQUAL, "split/graph.py",
        "first = self._names[id(tensor)]\n            if not self._is_held(first):",
        'first = f"{path}.{name}"\n            if not self._is_held(first):',
        (f"{MODELS}::test_a_transformer_with_skips_and_tied_weights",),
    ),
    Mutant(
        "a-loss-weighs-a-little-more", BITS, "split/play.py",
        "torch.full_like(tensor, batch.weight)", "torch.full_like(tensor, batch.weight * (1 + 2e-7))",
        (f"{STAGES}::test_stages_are_the_whole_model_bit_for_bit",),
    ),
    Mutant(
        "columns-are-never-followed-by-rows", CROSSES, "split/ways/neurons.py",
        'found[node], found[partner] = "columns", "rows"', 'found[node], found[partner] = "columns", "columns"',
        (f"{LAYERS}::test_what_crosses_is_what_was_counted_by_hand",),
    ),
    Mutant(
        "a-halo-is-all-that-a-neighbour-has", CROSSES, "split/graph.py",
        "if both := own.common(need):", "if both := own.common(own):",
        (f"{WAYS}::test_the_halo_of_a_convolution_is_what_was_counted",),
    ),
    Mutant(
        "a-size-is-that-of-the-example", TRACED, "split/tidying.py",
        "if one == other or not isinstance(one, int):", "if True:",
        (f"{LAYERS}::test_a_divided_model_is_the_whole_one",),
    ),
    Mutant(
        "what-was-received-is-written-to", TRACED, "split/program.py",
        'vars(part)["inplace"] = False', "pass",
        (f"{STAGES}::test_a_module_that_writes_in_place_does_not_write_to_what_was_received",),
    ),
    Mutant(
        "a-part-draws-for-itself", CHANCE, "split/layers.py",
        "return value * kept", "return value * torch.empty_like(value).bernoulli_(1 - self.p).div_(1 - self.p)",
        (f"{LAYERS}::test_dropout_on_parts_and_on_the_whole_draws_the_same",),
    ),
    Mutant(
        "all-nodes-draw-the-same", CHANCE, "split/layers.py",
        "torch.manual_seed(mixed(chance, self._number))", "torch.manual_seed(mixed(chance, 0))",
        (f"{LAYERS}::test_dropout_is_that_of_a_model_seeded_by_hand_before_each",),
    ),
    Mutant(
        "a-short-microbatch-weighs-as-much-as-a-long-one", MICROBATCHES, "split/play.py",
        "size / samples))", "1 / microbatches))",
        (f"{STAGES}::test_any_number_of_samples_and_of_uneven_microbatches",),
    ),
    Mutant(
        "running-statistics-move-for-each-microbatch-as-for-a-minibatch", MICROBATCHES, "split/play.py",
        "part.momentum = 1 - (1 - moved) ** weight", "part.momentum = moved",
        (f"{MODELS}::test_batch_norm_in_microbatches_is_a_plain_loop_over_them",),
    ),
    Mutant(
        "a-weight-s-gradient-is-that-of-the-last-microbatch", ONCE, "split/weights.py",
        "return parts[0] if len(parts) == 1 else torch.cat(parts)", "return parts[-1]",
        (f"{WEIGHTS}::test_whatever_uses_weights_has_the_whole_ones_gradients",),
    ),
    Mutant(
        "weights-gradients-are-made-on-each-way-back", ONCE, "split/weights.py",
        "if func in FUNCTIONS and torch.is_grad_enabled():", "if False:",
        (f"{WEIGHTS}::test_a_product_of_each_weight_is_made_once",),
    ),
    Mutant(
        "segments-on-a-device-are-timed-by-the-thread", PREDICTED, "costs/splitting.py",
        "clock_of(device))", 'clock_of("cpu"))',
        (f"{COSTS}::test_segments_are_timed_by_the_clock_of_their_device",),
    ),
    Mutant(
        "making-weights-gradients-takes-no-time", ONCE, "costs/turns.py",
        "self._median(weights))", "0.0)",
        (f"{COSTS}::test_weights_gradients_once_are_timed_by_themselves_and_hold_what_they_are_made_of",),
    ),
    Mutant(
        "auto-takes-the-dearest-way", CHOSEN, "split/choosing.py",
        "found.sort(key=lambda one: one.seconds)", "found.sort(key=lambda one: (bool(one.reason), -one.seconds))",
        (f"{CHOOSING}::test_auto_takes_the_least_price_of_the_ways_that_can_be",),
    ),
    Mutant(
        "who-comes-first-holds-all-that-is-shared", EQUAL, "split/plan.py",
        "rewriter.share_out({node: home for node, home in placed.items() if isinstance(home, int)})",
        "rewriter.share_out({})",
        (f"{WAYS}::test_towers_share_out_their_weights_each_of_which_has_one_owner_and_a_message_each_way",),
    ),
    Mutant(
        "what-crosses-costs-nothing", PREDICTED, "costs/splitting.py",
        "price_step(made, costs, link, batch_size / microbatches)",
        "price_step(made, costs, None, batch_size / microbatches)",
        (f"{COSTS}::test_a_step_is_the_price_of_its_segments_with_what_each_home_does_besides",),
    ),
    Mutant(
        "each-part-of-a-layer-has-all-its-operations", PREDICTED, "split/graph.py",
        'made.meta["flops"] = round(node.meta["flops"] * self._share(node, part))',
        'made.meta["flops"] = node.meta["flops"]',
        (f"{COSTS}::test_what_is_where_adds_up_to_the_whole",),
    ),
    Mutant(
        "a-copy-of-the-output-goes-back-too", SCRIPTED, "split/graph.py",
        "            shape = replace(shape, differentiable=False)\n", "",
        (f"{SCRIPTS}::test_every_partition_is_given_what_the_whole_model_gives_and_its_gradient_goes_back",),
    ),
    Mutant(
        "a-minibatch-goes-back-twice", SCRIPTED, "runtime/split_model.py",
        "        self._goes_back = False\n        if went", "        if went",
        (f"{SCRIPTS}::test_what_a_split_model_cannot_do_is_refused[going back twice]",),
    ),
    Mutant(
        "a-loss-leaves-no-gradient-of-before", SCRIPTED, "runtime/split_model.py",
        "parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)", "parameter.grad = own",
        (f"{SCRIPTS}::test_with_its_loss_a_model_goes_through_its_partitions_in_microbatches",),
    ),
    Mutant(
        "nobody-says-that-a-step-has-ended", SCRIPTED, "fabric/crossings.py",
        "        self._stamps[_word(OWN * self._home + 2)] = self._step\n", "",
        ("tests/core/test_crossings.py::test_a_home_says_which_step_it_has_ended",),
    ),
    Mutant(
        "no-tensor-lies-in-a-file", BUILT, "tasks/on_disk.py",
        "and storage.nbytes() >= LARGE and not", "and storage.nbytes() < 0 and not",
        (f"{BUILDING}::test_weights_to_begin_with_lie_in_files_too",),
    ),
    Mutant(
        "a-file-has-not-what-was-made", BUILT, "tasks/on_disk.py",
        "            if filled:\n", "            if not filled:\n",
        (f"{BUILDING}::test_any_model_is_the_one_in_memory",), seconds=20.0,
    ),
    Mutant(
        "a-tensor-leaves-the-storage-that-it-is-set-to", BUILT, "tasks/on_disk.py",
        "if isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable:",
        "if isinstance(func, torch._ops.OpOverload):",
        (f"{BUILDING}::test_what_is_in_memory_after_all_is_told",),
    ),
    Mutant(
        "an-error-that-memory-would-not-have-is-forgotten", BUILT, "tasks/on_disk.py",
        "            model = build()\n        if not files.refused:\n",
        "            model = build()\n        if True:\n",
        (f"{BUILDING}::test_what_is_in_memory_after_all_is_told",),
    ),
    Mutant(
        "a-model-that-is-built-again-draws-on", BUILT, "tasks/on_disk.py",
        "    numpy.random.set_state(chance[1])\n", "",
        (f"{BUILDING}::test_what_is_in_memory_after_all_is_told",),
    ),
    Mutant(
        "a-whole-tensor-is-moved-for-a-part-of-it", BUILT, "split/program.py",
        "part = whole.detach().narrow(", "part = whole.detach().to(self._device or whole.device).narrow(",
        (f"{MOVED}::test_a_partition_moves_its_own_part_and_nothing_else[filters]",),
    ),
    Mutant(
        "a-constant-stays-where-it-was-traced", BUILT, "split/program.py",
        "self._moved(self._split.constant(name))", "self._split.constant(name)",
        (f"{MOVED}::test_what_tracing_wrote_down_is_of_the_device_that_computes",),
    ),
    Mutant(
        "a-device-that-was-written-down-stays", BUILT, "split/program.py",
        "return self._device if isinstance(argument, torch.device) and argument in self._elsewhere else argument",
        "return argument",
        (f"{MOVED}::test_what_tracing_wrote_down_is_of_the_device_that_computes",),
    ),
    Mutant(
        "weights-are-read-a-byte-too-late", BUILT, "record/restore.py",
        "file.seek(one.data_offsets[0])", "file.seek(one.data_offsets[0] + 1)",
        (f"{BUILDING}::test_weights_to_begin_with_lie_in_files_too",),
    ),
    Mutant(
        "an-evaluator-builds-a-split-model-in-memory", EVALUATED, "places/processes/process.py",
        "model = build_on_disk(task, settings.seed).model\n", 'model = build_model(task, settings.seed, "cpu")\n',
        (f"{EVALUATING}[downpour-stages]",), seconds=20.0,
    ),
    Mutant(
        "what-an-evaluator-was-built-with-stays", EVALUATED, "strategies/served.py",
        "            flat.swap(0)  # what the model was built with goes before anything lands\n", "            pass\n",
        ("tests/processes/test_partitions.py::test_an_evaluator_leaves_what_it_was_built_with_before_parameters_come",),
    ),
    Mutant(
        "what-an-evaluator-fetches-over-tcp-lands-in-its-own-memory", EVALUATED, "places/processes/process.py",
        "            self.endpoint.zeros = zeros_on_disk\n", "",
        (f"{EVALUATING}[tcp-stages]",), seconds=20.0,
    ),
    Mutant(
        "what-partitions-send-lands-in-memory-of-the-leads-own", EVALUATED, "strategies/grouped/measured.py",
        "vector = zeros_on_disk(self._layout.total)", "vector = torch.zeros(self._layout.total, dtype=torch.uint8)",
        (f"{EVALUATING}[single-stages]",), seconds=20.0,
    ),
]  # fmt: skip
