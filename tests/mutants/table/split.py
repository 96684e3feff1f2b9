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
SCRIPTS, SCRIPTED = "tests/machines/test_split_scripts.py", "A script's split model is the whole one"

MUTANTS = [
    Mutant(
        "a-bias-is-added-at-each-home",
        EQUAL,
        "split/ways/neurons.py",
        "if home == 0 and layer.bias is not None:  # it is added once",
        "if layer.bias is not None:",
        (f"{LAYERS}::test_a_divided_model_is_the_whole_one",),
    ),
    Mutant(
        "a-gradient-that-comes-back-takes-the-place-of-one-that-is-there",
        EQUAL,
        "split/play.py",
        "total = gradient if total is None or gradient is None else total + gradient",
        "total = gradient",
        (f"{STAGES}::test_what_skips_goes_from_its_producer_to_each_home_once",),
    ),
    Mutant(
        "padding-of-a-region-is-zero-under-a-largest-value-too",
        EQUAL,
        "split/ways/regions.py",
        'fill = float("-inf") if',
        "fill = 0.0 if",
        (f"{WAYS}::test_regions_are_the_whole_model",),
    ),
    Mutant(
        "a-chunk-begins-with-no-state",
        EQUAL,
        "split/ways/time.py",
        "(flow,) if state is None else (flow, state)",
        "(flow,)",
        (f"{WAYS}::test_time_is_the_whole_model",),
    ),
    Mutant(
        "tied-weights-are-two",
        EQUAL,
        "split/graph.py",
        "first = self._names[id(tensor)]\n            if not self._is_held(first):",
        'first = f"{path}.{name}"\n            if not self._is_held(first):',
        (f"{MODELS}::test_a_transformer_with_skips_and_tied_weights",),
    ),
    Mutant(
        "a-loss-weighs-a-little-more",
        BITS,
        "split/play.py",
        "torch.full_like(tensor, batch.weight)",
        "torch.full_like(tensor, batch.weight * (1 + 2e-7))",
        (f"{STAGES}::test_stages_are_the_whole_model_bit_for_bit",),
    ),
    Mutant(
        "columns-are-never-followed-by-rows",
        CROSSES,
        "split/ways/neurons.py",
        'found[node], found[partner] = "columns", "rows"',
        'found[node], found[partner] = "columns", "columns"',
        (f"{LAYERS}::test_what_crosses_is_what_was_counted_by_hand",),
    ),
    Mutant(
        "a-halo-is-all-that-a-neighbour-has",
        CROSSES,
        "split/graph.py",
        "if both := own.common(need):",
        "if both := own.common(own):",
        (f"{WAYS}::test_the_halo_of_a_convolution_is_what_was_counted",),
    ),
    Mutant(
        "a-size-is-that-of-the-example",
        TRACED,
        "split/tidying.py",
        "if one == other or not isinstance(one, int):",
        "if True:",
        (f"{LAYERS}::test_a_divided_model_is_the_whole_one",),
    ),
    Mutant(
        "what-was-received-is-written-to",
        TRACED,
        "split/program.py",
        'vars(part)["inplace"] = False',
        "pass",
        (f"{STAGES}::test_a_module_that_writes_in_place_does_not_write_to_what_was_received",),
    ),
    Mutant(
        "a-part-draws-for-itself",
        CHANCE,
        "split/ways/following.py",
        "sides = (*value.shape[:at], self.whole, *value.shape[at + 1 :])",
        "sides = tuple(value.shape)",
        (f"{LAYERS}::test_dropout_on_parts_and_on_the_whole_draws_the_same",),
    ),
    Mutant(
        "all-nodes-draw-the-same",
        CHANCE,
        "split/layers.py",
        "torch.manual_seed(mixed(chance, self._number))",
        "torch.manual_seed(mixed(chance, 0))",
        (f"{LAYERS}::test_dropout_is_that_of_a_model_seeded_by_hand_before_each",),
    ),
    Mutant(
        "a-short-microbatch-weighs-as-much-as-a-long-one",
        MICROBATCHES,
        "split/play.py",
        "size / samples))",
        "1 / microbatches))",
        (f"{STAGES}::test_any_number_of_samples_and_of_uneven_microbatches",),
    ),
    Mutant(
        "running-statistics-move-for-each-microbatch-as-for-a-minibatch",
        MICROBATCHES,
        "split/play.py",
        "part.momentum = 1 - (1 - moved) ** weight",
        "part.momentum = moved",
        (f"{MODELS}::test_batch_norm_in_microbatches_is_a_plain_loop_over_them",),
    ),
    Mutant(
        "auto-takes-the-dearest-way",
        CHOSEN,
        "split/choosing.py",
        "found.sort(key=lambda one: one.seconds)",
        "found.sort(key=lambda one: (bool(one.reason), -one.seconds))",
        (f"{CHOOSING}::test_auto_takes_the_least_price_of_the_ways_that_can_be",),
    ),
    Mutant(
        "who-comes-first-holds-all-that-is-shared",
        EQUAL,
        "split/plan.py",
        "rewriter.share_out({node: home for node, home in placed.items() if isinstance(home, int)})",
        "rewriter.share_out({})",
        (f"{WAYS}::test_towers_share_out_their_weights_each_of_which_has_one_owner_and_a_message_each_way",),
    ),
    Mutant(
        "what-crosses-costs-nothing",
        PREDICTED,
        "costs/splitting.py",
        "price_pipeline(made, turns.costs(), link, batch_size / microbatches)",
        "price_pipeline(made, turns.costs(), None, batch_size / microbatches)",
        (f"{COSTS}::test_a_step_is_the_price_of_its_segments_with_what_each_home_does_besides",),
    ),
    Mutant(
        "each-part-of-a-layer-has-all-its-operations",
        PREDICTED,
        "split/graph.py",
        'made.meta["flops"] = round(node.meta["flops"] * self._share(node, part))',
        'made.meta["flops"] = node.meta["flops"]',
        (f"{COSTS}::test_what_is_where_adds_up_to_the_whole",),
    ),
    Mutant(
        "a-copy-of-the-output-goes-back-too",
        SCRIPTED,
        "split/graph.py",
        "            shape = replace(shape, differentiable=False)\n",
        "",
        (f"{SCRIPTS}::test_every_partition_is_given_what_the_whole_model_gives_and_its_gradient_goes_back",),
    ),
    Mutant(
        "a-minibatch-goes-back-twice",
        SCRIPTED,
        "runtime/split_model.py",
        "        self._goes_back = False\n        if went",
        "        if went",
        (f"{SCRIPTS}::test_what_a_split_model_cannot_do_is_refused[going back twice]",),
    ),
    Mutant(
        "a-loss-leaves-no-gradient-of-before",
        SCRIPTED,
        "runtime/split_model.py",
        "parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)",
        "parameter.grad = own",
        (f"{SCRIPTS}::test_with_its_loss_a_model_goes_through_its_partitions_in_microbatches",),
    ),
    Mutant(
        "nobody-says-that-a-step-has-ended",
        SCRIPTED,
        "fabric/crossings.py",
        "        self._stamps[_word(OWN * self._home + 2)] = self._step\n",
        "",
        ("tests/core/test_crossings.py::test_a_home_says_which_step_it_has_ended",),
    ),
]
