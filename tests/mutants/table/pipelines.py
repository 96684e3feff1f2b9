"""Mutants of what is split: the order in which partitions compute, what crosses between them, and the models for it."""

from mutants import Mutant

PIPELINES, MODELS = "tests/core/test_pipelines.py", "tests/core/test_models.py"
ENDS = "pipeline"
BUILT_IN = "built-in-models"
ANY = f"{PIPELINES}::test_every_pipeline_over_any_graph_is_proved_with_its_own_slots_and_with_more"

MUTANTS = [
    Mutant("a-boundary-has-slots-for-what-its-target-holds", "pipeline", "schedules/pipeline.py",
        "self.in_flight[self.graph.boundaries[boundary].source]",
        "self.in_flight[self.graph.boundaries[boundary].target]",
        (f"{PIPELINES}::test_what_skips_partitions_has_slots_for_all_that_its_source_has_in_flight",)),
    Mutant("a-gradient-leaves-before-all-have-added-to-it", "pipeline", "schedules/pipeline.py",
        "earlier = {number for segment in self.segments[: task.segment] for number in segment.takes}",
        "earlier = {number for segment in self.segments[task.segment + 1 :] for number in segment.takes}",
        (f"{PIPELINES}::test_a_value_crosses_once_to_each_partition_that_takes_it_and_passes_by_those_between", ANY)),
    Mutant(
        "a-partition-goes-back-before-it-is-full", ENDS, "schedules/pipeline.py",
        "        if turn >= in_flight:\n            yield PartitionTask(Pass.BACKWARD, turn - in_flight)\n"
        "        if turn < microbatches:\n            yield PartitionTask(Pass.FORWARD, turn)\n",
        "        if turn < microbatches:\n            yield PartitionTask(Pass.FORWARD, turn)\n"
        "        if turn >= in_flight:\n            yield PartitionTask(Pass.BACKWARD, turn - in_flight)\n",
        (f"{PIPELINES}::test_the_orders_are_those_of_pytorchs_pipelining_and_its_simulator_ends_them",),
    ),
    Mutant("bytes-cross-for-nothing", "pipeline-price", "schedules/pipeline_price.py",
        "size / self.link.bandwidth", "0.0",
        (f"{PIPELINES}::test_messages_cost_latency_and_bytes_of_each_sample",)),
    Mutant("places-have-no-bias", BUILT_IN, "zoo/mnist.py",
        "torch.baddbmm(self.bias.flatten", "torch.baddbmm(0 * self.bias.flatten",
        (f"{MODELS}::test_a_locally_connected_layer_has_filters_of_its_own_at_each_place",)),
    Mutant("a-character-sees-those-behind-it", BUILT_IN, "zoo/gpt.py",
        "is_causal=True", "is_causal=False",
        (f"{MODELS}::test_a_transformer_sees_only_what_came_before_and_its_last_layer_is_its_embedding",)),
    Mutant("a-pair-is-the-same-if-it-was-meant-to-be", BUILT_IN, "zoo/mnist.py",
        "self.same = (classes[self.partners] == classes).float()", "self.same = alike.float()",
        (f"{MODELS}::test_pairs_say_whether_both_are_of_one_class_and_half_of_them_are",)),
    Mutant("names-that-differ-are-layers-that-lack", "renamed-layers", "sharding/layout.py",
        "if nameless(server) != nameless(joining):", "if server != joining:",
        ("tests/core/test_layout.py::test_a_model_that_differs_is_refused_with_its_first_difference[renamed]",)),
]  # fmt: skip
