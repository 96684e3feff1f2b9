"""Mutants of codecs, compressed files and what makes them."""

from mutants import Mutant

CODECS = "A codec gives back what it was given"
ENTROPY = "Huffman codes of ids and gaps are within 3 %"
FILE = "A compressed file is read as it was written"
ZERO = "What was pruned stays zero"
HALF = "In fp16, a gradient that overflows"
RATIO = "The ratio that `compress` tells"
POINT = "With `--fixed-point`, what is multiplied"
FIXED = "tests/core/test_fixed_point.py"
LEAN = "Inference in int8 multiplies each sample"
CAST = "tests/core/test_autocast.py"
CHECK = "tests/core/test_codecs.py::test_every_codec_keeps_its_promises"
NEAR = "tests/core/test_codecs.py::test_a_huffman_code_is_within_3_percent_of_the_entropy"
SMALL = "tests/simulated/test_compress.py::test_a_run_becomes_a_small_file_that_does_as_well"

MUTANTS = [
    Mutant(
        "bytes-behind-the-last-code-are-not-seen", CODECS, "codecs/huffman.py",
        "cut(stream, (-(-int(ends[-1]) // 8),), what)", "cut(stream, (-1,), what)",
        (f"{CHECK}[huffman]",),
    ),
    Mutant(
        "gaps-forget-their-fillers", CODECS, "codecs/gaps.py",
        "reached = np.cumsum(symbols.astype(np.int64) + (symbols < filler))",
        "reached = np.cumsum((symbols.astype(np.int64) + 1) * (symbols < filler))",
        (f"{CHECK}[gaps]",),
    ),
    Mutant(
        "int8-has-one-scale", CODECS, "codecs/low_precision.py",
        "    return largest / np.float32(LEVELS)",
        "    return np.full_like(largest, largest.max(initial=0)) / np.float32(4 * LEVELS)",
        (f"{CHECK}[int8]",),
    ),
    Mutant(
        "a-codebook-may-be-too-short", CODECS, "codecs/clusters.py",
        "(len(ids) and int(ids.max()) >= entries) or not", "not",
        (f"{CHECK}[clusters from linear]",),
    ),
    Mutant(
        "symbols-of-few-bits-are-coded-one-by-one", ENTROPY, "codecs/huffman.py",
        "TOGETHER_BITS = 6\n", "TOGETHER_BITS = 1\n",
        (f"{NEAR}[2]",),
    ),
    Mutant(
        "the-lightest-trees-are-joined-last", ENTROPY, "codecs/huffman.py",
        "    trees = [(int(weights[symbol]), int(symbol), [int(symbol)]) for",
        "    trees = [(1, int(symbol), [int(symbol)]) for",
        (f"{NEAR}[4]", "tests/core/test_codecs.py::test_codes_are_as_short_as_any_prefix_code"),
    ),
    Mutant(
        "a-checksum-is-not-looked-at", FILE, "codecs/file.py",
        "if zlib.crc32(memoryview(data)[:-4]) != ", "if len(data) < 0 and zlib.crc32(memoryview(data)[:-4]) != ",
        ("tests/core/test_model_files.py::test_what_is_spoilt_is_refused_and_nothing_else_happens",),
    ),
    Mutant(
        "a-header-may-say-anything", FILE, "codecs/file.py",
        "        _check(entry)\n", "",
        ("tests/core/test_model_files.py::test_a_header_that_lies_is_refused_before_anything_is_made_of_it",),
    ),
    Mutant(
        "a-file-with-more-tensors-fits", FILE, "tasks/files/constrained.py",
        "    if more := [name for name in state if name not in own]:",
        "    if more := [name for name in state if name not in state]:",
        ("tests/core/test_model_files.py::test_a_model_that_does_not_fit_is_refused_with_the_first_difference",),
    ),
    Mutant(
        "what-a-file-names-is-imported", FILE, "tasks/files/loading.py",
        "    if not task and file.task not in BUILTINS:", "    if not (task or file.task):",
        ("tests/core/test_model_files.py::test_nothing_is_imported_because_a_file_names_it",),
    ),
    Mutant(
        "a-shared-gradient-is-a-mean", ZERO, "tasks/files/constrained.py",
        "values.index_select(0, self.ids)",
        "(values + (values - values.detach()) * (1 / self.ids.numel() - 1)).index_select(0, self.ids)",
        ("tests/core/test_model_files.py::test_a_constrained_model_has_the_values_of_its_file_and_summed_gradients",),
    ),
    Mutant(
        "what-was-pruned-comes-back", ZERO, "tasks/files/constrained.py",
        "            kept = kept.new_zeros(self._size)", "            kept = kept.new_full((self._size,), 1e-3)",
        ("tests/core/test_model_files.py::test_a_constrained_model_has_the_values_of_its_file_and_summed_gradients",),
    ),
    Mutant(
        "the-ratio-is-that-of-the-weights-alone", RATIO, "compression/compressing.py",
        "    size = path.stat().st_size\n",
        "    size = sum(len(part) for one in file.tensors.values() for part in one.encode(file.huffman))\n",
        (SMALL,),
    ),
    Mutant(
        "the-error-is-that-of-the-run", RATIO, "compression/compressing.py",
        "    fill(models[1], read)\n", "    models[1].load_state_dict(origin.state)\n",
        (SMALL,),
    ),
    Mutant(
        "what-overflowed-is-given-as-it-is", HALF, "tasks/arithmetic/autocast.py",
        "if all(bool(one.isfinite().all()) for one in found):", "if found:",
        (f"{CAST}::test_what_overflows_is_computed_again_with_half_the_scale_and_told",),
    ),
    Mutant(
        "a-gradient-stays-scaled", HALF, "tasks/arithmetic/autocast.py",
        "                    one.div_(self.scale)\n", "                    one.div_(1.0)\n",
        (f"{CAST}::test_small_gradients_do_not_become_zero_in_fp16",),
    ),
    Mutant(
        "buffers-see-a-minibatch-twice", HALF, "tasks/arithmetic/autocast.py",
        "            buffer.copy_(before)\n", "            buffer.copy_(buffer)\n",
        (f"{CAST}::test_what_overflows_is_computed_again_with_half_the_scale_and_told",),
    ),
    Mutant(
        "gradients-are-multiplied-unrounded", POINT, "tasks/arithmetic/fixed_point.py",
        "            loss = loss_of()\n            loss.backward()\n",
        "            loss = loss_of()\n        loss.backward()\n",
        (f"{FIXED}::test_a_step_multiplies_rounded_values_only",),
    ),
    Mutant(
        "overflows-raise-no-scale", POINT, "codecs/fixed_point.py",
        "            self.exponent += 1\n", "            self.exponent += 0\n",
        (f"{FIXED}::test_the_scale_is_raised_by_overflows_and_lowered_where_half_would_do",),
    ),
    Mutant(
        "what-is-cut-is-not-counted", POINT, "tasks/worker.py",
        "overflows=overflows, counted=counted", "counted=counted",
        (f"{FIXED}::test_ten_bits_learn_as_float32_does_and_overflows_are_told",),
    ),
    Mutant(
        "infinity-is-cut-in-silence", POINT, "codecs/fixed_point.py",
        "if not math.isfinite(largest):", "if math.isnan(largest):",
        (f"{FIXED}::test_what_is_not_finite_is_never_silent",),
    ),
    Mutant(
        "shards-keep-all-digits", POINT, "server/slice.py",
        "        if self._fixed_point:\n", "        if False:\n",
        (f"{FIXED}::test_parameters_of_a_job_are_on_the_grid_of_its_updates",),
    ),
    Mutant(
        "samples-share-a-scale", LEAN, "tasks/files/lean.py",
        "    scales = rows.abs().amax(1, keepdim=True)", "    scales = rows.abs().amax().expand(len(rows), 1)",
        ("tests/core/test_lean.py::test_a_linear_layer_of_int8_multiplies_rounded_rows",),
    ),
    Mutant(
        "paired-ids-change-places", LEAN, "tasks/files/lean.py",
        "(both[:, 0] << PAIRED_BITS | both[:, 1])", "(both[:, 1] << PAIRED_BITS | both[:, 0])",
        ("tests/core/test_lean.py::test_a_weight_of_ids_is_the_dense_one",),
    ),
    Mutant(
        "a-tensor-may-be-there-twice", FILE, "codecs/file.py",
        "if total > VALUES_LIMIT or entry.name in tensors:", "if total > VALUES_LIMIT:",
        ("tests/core/test_model_files.py::test_tensors_that_cannot_be_together_are_refused",),
    ),
    Mutant(
        "pruned-tensors-may-have-any-number-of-values", FILE, "codecs/file.py",
        "if total > VALUES_LIMIT or entry.name in tensors:", "if entry.name in tensors:",
        ("tests/core/test_model_files.py::test_tensors_that_cannot_be_together_are_refused",),
    ),
    Mutant(
        "a-further-name-may-be-of-no-tensor", FILE, "codecs/file.py",
        "if of not in tensors or alias in tensors]", "if alias in tensors]",
        ("tests/core/test_model_files.py::test_tensors_that_cannot_be_together_are_refused",),
    ),
    Mutant(
        "a-further-name-may-be-that-of-a-tensor", FILE, "codecs/file.py",
        "if of not in tensors or alias in tensors]", "if of not in tensors]",
        ("tests/core/test_model_files.py::test_tensors_that_cannot_be_together_are_refused",),
    ),
    Mutant(
        "a-header-of-a-compressed-file-has-no-limit", FILE, "codecs/file.py",
        "if length > HEADER_LIMIT or 12 + length > len(data):", "if 12 + length > len(data):",
        ("tests/core/test_model_files.py::test_a_file_over_the_limit_is_not_read",),
    ),
    Mutant(
        "a-later-format-of-compressed-files-is-read", FILE, "codecs/file.py",
        "    if data[:4] != MAGIC:", "    if data[:3] != MAGIC[:3]:",
        ("tests/core/test_model_files.py::test_a_foreign_file_is_refused",),
    ),
    Mutant(
        "whole-numbers-may-be-shared", FILE, "codecs/file.py",
        '        and (DTYPES[entry.dtype] == "float32" or not (entry.bits or entry.precision))\n', "",
        ("tests/core/test_model_files.py::test_a_header_that_lies_is_refused_before_anything_is_made_of_it",),
    ),
    Mutant(
        "fewer-than-no-values-may-be-kept", FILE, "codecs/file.py",
        "0 <= entry.kept <= size", "entry.kept <= size",
        ("tests/core/test_model_files.py::test_a_header_that_lies_is_refused_before_anything_is_made_of_it",),
    ),
    Mutant(
        "a-tensor-that-is-whole-may-have-positions", FILE, "codecs/file.py",
        "        and (entry.kept is not None or entry.where == 0)\n", "",
        ("tests/core/test_model_files.py::test_a_header_that_lies_is_refused_before_anything_is_made_of_it",),
    ),
    Mutant(
        "positions-may-have-fewer-than-no-bytes", FILE, "codecs/file.py",
        "        and min(entry.where, entry.what) >= 0\n", "",
        ("tests/core/test_model_files.py::test_a_header_that_lies_is_refused_before_anything_is_made_of_it",),
    ),
    Mutant(
        "a-compressed-file-has-no-limit", FILE, "codecs/file.py",
        "if (size := path.stat().st_size) > FILE_LIMIT:", "if (size := path.stat().st_size) < 0:",
        ("tests/core/test_model_files.py::test_a_file_over_the_limit_is_not_read",),
    ),
]  # fmt: skip
