"""Mutants of codecs, compressed files and what makes them."""

from mutants import Mutant

CODECS = "codecs"
ENTROPY = "huffman-codes"
FILE = "compressed-file"
ZERO = "pruned-and-shared"
HALF = "fp16-overflow"
RATIO = "compression-ratio"
POINT = "fixed-point"
FIXED = "tests/core/test_fixed_point.py"
LEAN = "int8-inference"
CAST = "tests/core/test_autocast.py"
CHECK = "tests/core/test_codecs.py::test_every_codec_keeps_its_promises"
UNPACKED = "tests/core/test_codecs.py::test_a_code_is_not_unpacked_beyond_what_was_asked_for_and_its_bytes_pay_for"
NEAR = "tests/core/test_codecs.py::test_a_huffman_code_is_within_3_percent_of_the_entropy"
SMALL = "tests/simulated/test_compress.py::test_a_run_becomes_a_small_file_that_does_as_well"

MUTANTS = [
    Mutant("bytes-behind-the-last-code-are-not-seen", CODECS, "codecs/symbols.py",
        " or inflate.unused_data:", ":",
        (f"{CHECK}[huffman]",)),
    Mutant("few-bytes-hold-any-number-of-symbols", CODECS, "codecs/symbols.py",
        "if length > 8 * len(coded):", "if length < 0:",
        (f"{UNPACKED}[16777216-which cannot hold them]",)),
    Mutant("codes-do-not-follow-the-symbols", ENTROPY, "codecs/symbols.py",
        "zlib.Z_HUFFMAN_ONLY", "zlib.Z_FIXED",
        (f"{NEAR}[4]",)),
    Mutant("a-checksum-is-not-looked-at", FILE, "codecs/file.py",
        "if zlib.crc32(memoryview(data)[:-4]) != ", "if len(data) < 0 and zlib.crc32(memoryview(data)[:-4]) != ",
        ("tests/core/test_model_files.py::test_what_is_spoilt_is_refused_and_nothing_else_happens",)),
    Mutant("a-file-with-more-tensors-fits", "compressed-model", "tasks/constrained.py",
        "    if more := [name for name in state if name not in tensors]:",
        "    if more := [name for name in state if name not in state]:",
        ("tests/core/test_model_files.py::test_a_model_that_does_not_fit_is_refused_with_the_first_difference",)),
    Mutant("what-a-file-names-is-imported", "compressed-model", "tasks/inference.py",
        "    if not task and file.task not in TASKS:", "    if not (task or file.task):",
        ("tests/core/test_model_files.py::test_nothing_is_imported_because_a_file_names_it",)),
    Mutant("what-was-pruned-comes-back", ZERO, "tasks/constrained.py",
        "            kept = kept.new_zeros(self._size)", "            kept = kept.new_full((self._size,), 1e-3)",
        ("tests/core/test_model_files.py::test_a_constrained_model_has_the_values_of_its_file_and_summed_gradients",)),
    Mutant("the-error-is-that-of-the-run", RATIO, "lab/compress/compressing.py",
        '("test_error", read.state())', '("test_error", origin.state)',
        (SMALL,)),
    Mutant("a-gradient-stays-scaled", HALF, "tasks/arithmetic.py",
        "                    gradient.div_(self.scale)\n", "                    gradient.div_(1.0)\n",
        (f"{CAST}::test_small_gradients_do_not_become_zero_in_fp16",)),
    Mutant("buffers-see-a-minibatch-twice", HALF, "tasks/arithmetic.py",
        "            buffer.copy_(before)\n", "            buffer.copy_(buffer)\n",
        (f"{CAST}::test_what_overflows_is_computed_again_with_half_the_scale_and_told",)),
    Mutant("gradients-are-multiplied-unrounded", POINT, "tasks/arithmetic.py",
        "        with self:\n            loss = loss_of()\n            loss.backward()\n",
        "        with self:\n            loss = loss_of()\n        loss.backward()\n",
        (f"{FIXED}::test_a_step_multiplies_rounded_values_only",)),
    Mutant("overflows-raise-no-scale", POINT, "codecs/fixed_point.py",
        "            self.exponent += 1\n", "            self.exponent += 0\n",
        (f"{FIXED}::test_the_scale_is_raised_by_overflows_and_lowered_where_half_would_do",)),
    Mutant("what-is-cut-is-not-counted", POINT, "tasks/worker.py",
        "overflows=overflows, counted=counted", "counted=counted",
        (f"{FIXED}::test_ten_bits_learn_as_float32_does_and_overflows_are_told",)),
    Mutant("infinity-is-cut-in-silence", POINT, "codecs/fixed_point.py",
        "if not math.isfinite(largest):", "if math.isnan(largest):",
        (f"{FIXED}::test_what_is_not_finite_is_never_silent",)),
    Mutant("shards-keep-all-digits", POINT, "server/optimizers.py",
        "    return [partial(round_each, bits=bits.updates)] if bits else []\n", "    return []\n",
        (f"{FIXED}::test_parameters_of_a_job_are_on_the_grid_of_its_updates",)),
    Mutant("a-rounded-step-is-an-addition", POINT, "server/slice.py",
        "isinstance(self._optimizer, torch.optim.SGD) or self._post_hooks:",
        "isinstance(self._optimizer, torch.optim.SGD):",
        ("tests/machines/test_passed.py::test_parameters_in_shared_memory_are_rounded_after_each_step",)),
    Mutant("samples-share-a-scale", LEAN, "tasks/inference.py",
        "    scales = rows.abs().amax(1, keepdim=True)", "    scales = rows.abs().amax().expand(len(rows), 1)",
        ("tests/core/test_lean.py::test_a_linear_layer_of_int8_multiplies_rounded_rows",)),
    Mutant("paired-ids-change-places", LEAN, "tasks/inference.py",
        "(both[:, 0] << PAIRED_BITS | both[:, 1])", "(both[:, 1] << PAIRED_BITS | both[:, 0])",
        ("tests/core/test_lean.py::test_a_weight_of_ids_is_the_dense_one",)),
    Mutant("a-tensor-may-be-there-twice", FILE, "codecs/file.py",
        "if len(names) < len(self.entries):", "if not self.entries:",
        ("tests/core/test_model_files.py::test_tensors_that_cannot_be_together_are_refused",)),
    Mutant("a-header-of-a-compressed-file-has-no-limit", FILE, "codecs/file.py",
        "if length > HEADER_LIMIT or 12 + length > len(data):", "if 12 + length > len(data):",
        ("tests/core/test_model_files.py::test_a_file_over_the_limit_is_not_read",)),
    Mutant("a-later-format-of-compressed-files-is-read", FILE, "codecs/file.py",
        "    if data[:4] != MAGIC:", "    if data[:3] != MAGIC[:3]:",
        ("tests/core/test_model_files.py::test_a_foreign_file_is_refused",)),
    Mutant("positions-may-have-fewer-than-no-bytes", FILE, "codecs/stored.py",
        "    where: Count\n", "    where: int\n",
        ("tests/core/test_model_files.py::test_a_header_that_lies_is_refused_before_anything_is_made_of_it",)),
]  # fmt: skip
