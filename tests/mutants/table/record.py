"""Mutants of what is kept: checkpoints, the run folder, the journal, and what is read back."""

from mutants import Mutant

CHECKPOINT = "whole-checkpoint"
RECUT = "other-shards"
FOLDER = "one-job-a-folder"
REVIVAL = "coordinator-death"
GARBAGE = "spoilt-files"
PICKLE = "nothing-unpickled"
FILES = "tests/core/test_record_checkpoints.py::"
GONE = "lost-folder"
UMASK = "file-modes"
SUMS = "resumed-sums"
METRICS = "tests/core/test_record_metrics.py::"
TIMELINE = "tests/core/test_record_timeline.py::"
FITS = FILES + "test_a_job_whose_data_would_come_in_another_order_does_not_go_on"
PACKED = "tests/core/test_idx.py::test_a_file_that_was_packed_small_is_read_and_one_over_the_limit_is_not"
AGAIN = (
    "tests/core/test_record_folder.py::test_a_folder_that_is_gone_is_seen_and_made_again_where_no_other_job_has_made_it"
)

MUTANTS = [
    Mutant("a-checkpoint-is-not-written-through", CHECKPOINT, "record/folder.py",
        "            if lasts:\n                _sync(file.fileno())\n", "",
        (FILES + "test_a_disk_that_fills_at_any_sync_leaves_the_last_good_checkpoint",)),
    Mutant("the-checksum-of-a-part-is-not-looked-at", GARBAGE, "record/restore.py",
        "if checksum(file) != part.crc32:", "if not part.crc32:",
        (FILES + "test_a_flipped_or_cut_off_byte_is_only_ever_a_checkpoint_error",), seconds=8),
    Mutant("files-are-for-their-owner-alone", UMASK, "record/folder.py",
        "mode: int = 0o666", "mode: int = 0o600",
        ("tests/core/test_record_folder.py::test_all_files_of_a_run_are_for_whom_the_umask_says",)),
    Mutant("a-folder-that-cannot-be-synced-is-none", "plain-file-systems", "record/folder.py",
        "        if error.errno not in UNSUPPORTED:\n", "        if error.errno:\n",
        ("tests/core/test_record_folder.py::test_a_file_system_that_does_not_sync_is_none_that_cannot_be_written",)),
    Mutant("sums-are-kept-that-have-too-much", SUMS, "record/recorder.py",
        "if self._settled.samples <= samples:", "if self._settled:",
        (METRICS + "test_a_checkpoint_that_is_sealed_too_late_has_no_sums",)),
    Mutant("what-was-gone-back-on-counts", SUMS, "record/metrics.py",
        "if total <= most[begun] or", "if total <= most[-1] or",
        (METRICS + "test_what_was_gone_back_on_is_left_out_without_holding_the_rest",)),
    Mutant("what-came-after-the-checkpoint-is-forgotten", SUMS, "record/recorder.py",
        "behind(path, mark) or path.stat().st_size", "path.stat().st_size",
        (METRICS + "test_only_what_came_after_the_checkpoint_is_read",)),
    Mutant("a-long-record-counts-whole-in-each-bin", "thinned-timeline", "record/timeline.py",
        "self._bin(number, type(sums)).add(sums, share)", "self._bin(number, type(sums)).add(sums)",
        (TIMELINE + "test_each_bin_has_the_shares_of_the_spans_that_lie_in_it",)),
    Mutant("happenings-grow-without-end", "thinned-timeline", "record/timeline.py",
        "while len(self.happenings) > LATEST:", "while not self.happenings:",
        (TIMELINE + "test_what_is_kept_is_bounded",)),
    Mutant("steps-are-of-the-moment-of-their-record", "thinned-timeline", "record/timeline.py",
        "return min(before, now)", "return max(before, now)",
        ("tests/core/test_page_reading.py::test_steps_that_a_record_counts_together_are_spread_over_their_time",)),
    Mutant("staleness-has-a-class-for-each-number", "thinned-timeline", "record/timeline.py",
        "max(0, staleness.bit_length() - DIGITS)", "0",
        (TIMELINE + "test_staleness_has_few_classes_however_large_it_is",)),
    Mutant("a-moment-has-the-shards-of-the-end", "thinned-timeline", "lab/watch/reading.py",
        "        if moment < known:\n", "        if moment < 0:\n",
        ("tests/core/test_page_reading.py::test_a_shard_has_the_pushes_and_staleness_of_each_moment",)),
    Mutant("a-follower-reads-all-metrics", "thinned-timeline", "record/following.py",
        "if sums is None or sums.position > size:", "if sums:",
        (TIMELINE + "test_a_follower_reads_only_what_came_after_the_kept_sums",)),
    Mutant("a-follower-counts-what-is-undone", "thinned-timeline", "record/following.py",
        "self._resumed = sums.position", "pass",
        (TIMELINE + "test_a_follower_has_the_sums_of_a_resumed_job",)),
    Mutant("times-that-were-recorded-count-again", "times-add-up", "runtime/player.py",
        "{use: seconds - last.get(use, 0.0) for", "{use: seconds for",
        (TIMELINE + "test_the_records_of_times_add_up_to_all_of_the_time",)),
    Mutant("a-history-grows-without-end", SUMS, "record/summary.py",
        "if len(self.history) > ROWS:", "if not self.history:",
        (METRICS + "test_a_long_history_is_thinned_and_has_its_first_and_its_last",)),
    Mutant("two-jobs-share-a-folder", FOLDER, "record/folder.py",
        "held = _locked(descriptor, fcntl.LOCK_EX, LOOKS)", "held = _locked(descriptor, fcntl.LOCK_SH, LOOKS)",
        ("tests/core/test_record_folder.py::test_one_job_at_a_time_has_a_folder",)),
    Mutant("a-child-of-a-job-lets-go-of-its-folder", FOLDER, "record/folder.py",
        "self._let_go.atexit = False", "self._let_go.atexit = True",
        ("tests/core/test_record_folder.py::test_a_lock_dies_with_its_process_and_not_with_a_child_of_it[forks]",)),
    Mutant("a-journal-that-was-cut-off-is-not-gone-through", REVIVAL, "record/journal.py",
        "    while end := _end(data, last):\n        last = end\n",
        "    if _end(data, last):\n        last = len(data)\n",
        ("tests/core/test_memory.py::test_a_writer_may_die_at_any_byte_and_the_next_goes_on_after_what_is_whole",)),
    Mutant(
        "an-old-file-of-weights-is-unpickled", PICKLE, "record/restore.py",
        '        remedy = (\n            "name a run',
        '        if source.suffix == ".pt":\n            return torch.load(source, weights_only=False)\n'
        '        remedy = (\n            "name a run',
        (
            "tests/core/test_house.py::test_nothing_is_unpickled",
            FILES + "test_what_is_no_checkpoint_is_refused_and_never_unpickled[pickle]",
        ),
    ),
    Mutant("a-piece-of-another-split-is-read-from-the-beginning", RECUT, "record/restore.py",
        "along).narrow(piece.dimension, piece.start,", "along).narrow(piece.dimension, 0,",
        (FILES + "test_a_checkpoint_of_a_split_model_goes_on_with_another_split_or_none",)),
    Mutant("a-checkpoint-of-another-number-of-samples-goes-on", "other-data", "record/restore.py",
        '        ("training samples", manifest.plan.samples, plan.samples),\n', "",
        (FITS,)),
    Mutant("settings-that-are-no-more-go-without-a-word", RECUT, "places/attempt.py",
        "if gone := sorted(", "if gone := sorted(() and ",
        ("tests/simulated/test_interrupted.py::test_a_run_of_settings_that_are_no_more_goes_on_without_them",)),
    Mutant("no-other-number-of-replicas-goes-on", RECUT, "record/restore.py",
        "return plan.settings.replicas if plan.allotted else 0", "return plan.settings.replicas",
        (FILES + "test_other_replicas_go_on_where_the_data_are_not_cut_for_them",)),
    Mutant("a-part-may-lack-a-master", GARBAGE, "record/restore.py",
        'if key[0] == "master" and len(having) < len(sources):', "if not having:",
        (FILES + "test_a_part_that_does_not_hold_what_its_shard_does_is_corrupt[a master is missing]",)),
    Mutant("an-older-format-is-read", GARBAGE, "record/checkpoints.py",
        "        if version != FORMAT:", "        if version > FORMAT:",
        (FILES + "test_another_format_and_a_shard_file_gone_are_told",)),
    Mutant("a-manifest-may-name-fewer-parts", GARBAGE, "record/checkpoints.py",
        "if len(manifest.parts) != len(manifest.plan.assignments):",
        "if len(manifest.parts) > len(manifest.plan.assignments):",
        (FILES + "test_a_manifest_that_names_other_parts_than_its_shards_is_corrupt",)),
    Mutant("a-part-may-be-longer-than-the-plan", CHECKPOINT, "record/model_file.py",
        "        if stop - start != held.size:", "        if stop - start < held.size:",
        (FILES + "test_a_part_that_is_longer_or_shorter_than_the_plan_fails_the_commit",)),
    Mutant("a-header-of-weights-has-no-limit", GARBAGE, "record/model_file.py",
        "        if length > HEADER_LIMIT:", "        if length < 0:",
        (FILES + "test_no_header_is_read_that_says_to_be_longer_than_may_be",)),
    Mutant("what-is-packed-small-is-refused", GARBAGE, "tasks/data_files.py",
        "GZIP_RATIO = 1032", "GZIP_RATIO = 100",
        (PACKED,)),
    Mutant("a-folder-that-was-moved-away-is-there", GONE, "record/folder.py",
        "        except OSError:\n            return True\n", "        except OSError:\n            return False\n",
        (AGAIN,)),
    Mutant("a-folder-that-is-made-again-is-anybodys", FOLDER, "record/folder.py",
        "        self.lock()\n        self.write_job(job)", "        self.write_job(job)",
        (AGAIN,)),
    Mutant("a-part-that-a-script-keeps-is-read-unseen", GARBAGE, "record/restore.py",
        "    file = _verified(folder, part)\n    try:\n        return load_file(file)",
        "    file = folder / part.file\n    try:\n        return load_file(file)",
        (FILES + "test_what_a_script_keeps_is_read_back_whole_or_refused",)),
]  # fmt: skip
