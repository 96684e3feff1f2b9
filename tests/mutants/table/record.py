"""Mutants of what is kept: checkpoints, the run folder, the journal, and what is read back."""

from mutants import Mutant

CHECKPOINT = "A checkpoint is whole or not there"
RECUT = "A checkpoint goes on with another number of shards"
FOLDER = "Two jobs never write into one run folder"
REVIVAL = "A coordinator that is killed is started anew"
GARBAGE = "Garbage on a link costs that link only"
PICKLE = "Nothing is ever unpickled"
FILES = "tests/core/test_record_checkpoints.py::"
GONE = "A run folder that is deleted or moved away"
FITS = FILES + "test_a_job_whose_data_would_come_in_another_order_does_not_go_on"
PACKED = "tests/core/test_idx.py::test_a_file_that_was_packed_small_is_read_and_one_over_the_limit_is_not"
AGAIN = (
    "tests/core/test_record_folder.py::test_a_folder_that_is_gone_is_seen_and_made_again_where_no_other_job_has_made_it"
)

MUTANTS = [
    Mutant(
        "what-was-made-of-a-checkpoint-stays", CHECKPOINT, "record/checkpoints.py",
        "            self.discard(number)\n            last", "            last",
        (FILES + "test_a_disk_that_fills_at_any_sync_leaves_the_last_good_checkpoint",),
    ),
    Mutant(
        "a-checkpoint-is-not-written-through", CHECKPOINT, "record/checkpoints.py",
        "    sync(path)\n    return CheckpointFile(path.name", "    return CheckpointFile(path.name",
        (FILES + "test_a_disk_that_fills_at_any_sync_leaves_the_last_good_checkpoint",),
    ),
    Mutant(
        "older-checkpoints-go-before-the-new-one-is-there", CHECKPOINT, "record/checkpoints.py",
        '        making, final = self._making(number), self.folder / f"{number:06d}"\n',
        '        making, final = self._making(number), self.folder / f"{number:06d}"\n        self._tidy(number, 0)\n',
        (FILES + "test_a_disk_that_fills_at_any_sync_leaves_the_last_good_checkpoint",),
    ),
    Mutant(
        "the-checksum-of-a-manifest-is-not-looked-at", GARBAGE, "record/checkpoints.py",
        "if zlib.crc32(outer.manifest) != outer.crc32:", "if not outer.crc32:",
        (FILES + "test_a_flipped_or_cut_off_byte_is_only_ever_a_checkpoint_error",), seconds=8,
    ),
    Mutant(
        "the-checksum-of-a-part-is-not-looked-at", GARBAGE, "record/restore.py",
        "if checksum(file) != part.crc32:", "if not part.crc32:",
        (FILES + "test_a_flipped_or_cut_off_byte_is_only_ever_a_checkpoint_error",), seconds=8,
    ),
    Mutant(
        "two-jobs-share-a-folder", FOLDER, "record/folder.py",
        "held = _locked(descriptor, fcntl.LOCK_EX, LOOKS)", "held = _locked(descriptor, fcntl.LOCK_SH, LOOKS)",
        ("tests/core/test_record_folder.py::test_one_job_at_a_time_has_a_folder",),
    ),
    Mutant(
        "a-child-of-a-job-lets-go-of-its-folder", FOLDER, "record/folder.py",
        "self._let_go.atexit = False", "self._let_go.atexit = True",
        ("tests/core/test_record_folder.py::test_a_lock_dies_with_its_process_and_not_with_a_child_of_it[forks]",),
    ),
    Mutant(
        "what-the-coordinator-missed-is-not-told-again", REVIVAL, "runtime/lasting.py",
        "        for message in missed:\n            self._endpoint.send(COORDINATOR, message)",
        "        for message in missed[1:]:\n            self._endpoint.send(COORDINATOR, message)",
        ("tests/simulated/test_revival.py::test_a_coordinator_may_die_at_any_message",), seconds=15,
    ),
    Mutant(
        "what-the-coordinator-had-said-is-not-told-again", REVIVAL, "runtime/lasting.py",
        "        for message in missed:\n            self._endpoint.send(role, message)",
        "        for message in missed[:0]:\n            self._endpoint.send(role, message)",
        ("tests/simulated/test_revival.py::test_a_coordinator_may_die_at_any_message",), seconds=15,
    ),
    Mutant(
        "a-journal-that-was-cut-off-is-not-gone-through", REVIVAL, "record/journal.py",
        "    while end := _end(data, last):\n        last = end\n",
        "    if _end(data, last):\n        last = len(data)\n",
        ("tests/core/test_memory.py::test_a_writer_may_die_at_any_byte_and_the_next_goes_on_after_what_is_whole",),
    ),
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
    Mutant(
        "a-piece-of-another-split-is-read-from-the-beginning", RECUT, "record/parts.py",
        ".narrow(own.dimension, own.start,", ".narrow(own.dimension, 0,",
        (FILES + "test_a_checkpoint_of_a_split_model_goes_on_with_another_split_or_none",),
    ),
    Mutant(
        "pieces-of-another-split-are-put-together-along-its-own-dimension", RECUT, "record/parts.py",
        "own, along = entry.piece, wanted[0].entry.piece.dimension", "own, along = entry.piece, entry.piece.dimension",
        (FILES + "test_a_checkpoint_of_a_split_model_goes_on_with_another_split_or_none",),
    ),
    Mutant(
        "a-checkpoint-of-another-number-of-samples-goes-on", RECUT, "record/restore.py",
        '        ("training samples", manifest.plan.samples, plan.samples),\n', "",
        (FITS,),
    ),
    Mutant(
        "a-checkpoint-of-another-order-goes-on", RECUT, "record/restore.py",
        '        ("order of the samples", manifest.plan.settings.data.order, plan.settings.data.order),\n', "",
        (FITS,),
    ),
    Mutant(
        "a-checkpoint-of-other-minibatches-goes-on", RECUT, "record/restore.py",
        '        ("samples in a minibatch", manifest.plan.settings.data.batch_size, plan.settings.data.batch_size),\n',
        "",
        (FITS,),
    ),
    Mutant(
        "data-that-were-cut-for-other-replicas-go-on", RECUT, "record/restore.py",
        '        ("replicas, each with a part of the data", _parts(manifest.plan), _parts(plan)),\n', "",
        (FITS,),
    ),
    Mutant(
        "no-other-number-of-replicas-goes-on", RECUT, "record/restore.py",
        "return plan.settings.replicas if plan.allotted else 0", "return plan.settings.replicas",
        (FILES + "test_other_replicas_go_on_where_the_data_are_not_cut_for_them",),
    ),
    Mutant(
        "a-part-may-lack-a-master", GARBAGE, "record/parts.py",
        'if key[0] == "master" and len(having) < len(sources):', "if not having:",
        (FILES + "test_a_part_that_does_not_hold_what_its_shard_does_is_corrupt[a master is missing]",),
    ),
    Mutant(
        "a-part-may-hold-another-number-of-values", GARBAGE, "record/parts.py",
        "            elif all(shape in ([], [1]) for shape in shapes):", "            elif shapes:",
        (FILES + "test_a_part_that_does_not_hold_what_its_shard_does_is_corrupt[a state is too short]",),
    ),
    Mutant(
        "an-older-format-is-read", GARBAGE, "record/checkpoints.py",
        "        if version != FORMAT:", "        if version > FORMAT:",
        (FILES + "test_another_format_and_a_shard_file_gone_are_told",),
    ),
    Mutant(
        "a-manifest-may-name-fewer-parts", GARBAGE, "record/checkpoints.py",
        "if len(manifest.parts) != len(manifest.plan.assignments):",
        "if len(manifest.parts) > len(manifest.plan.assignments):",
        (FILES + "test_a_manifest_that_names_other_parts_than_its_shards_is_corrupt",),
    ),
    Mutant(
        "a-part-may-be-longer-than-the-plan", CHECKPOINT, "record/model_file.py",
        "        if stop - start != own.size:", "        if stop - start < own.size:",
        (FILES + "test_a_part_that_is_longer_or_shorter_than_the_plan_fails_the_commit",),
    ),
    Mutant(
        "a-header-of-weights-has-no-limit", GARBAGE, "record/model_file.py",
        "        if length > HEADER_LIMIT:", "        if length < 0:",
        (FILES + "test_no_header_is_read_that_says_to_be_longer_than_may_be",),
    ),
    Mutant(
        "a-file-of-data-has-no-limit", GARBAGE, "tasks/data/idx.py",
        "if promised > min(BYTES_LIMIT, at_most - header.size):", "if promised > at_most - header.size:",
        (PACKED,),
    ),
    Mutant(
        "what-is-packed-small-is-refused", GARBAGE, "tasks/data/idx.py",
        "GZIP_RATIO = 1032", "GZIP_RATIO = 100",
        (PACKED,),
    ),
    Mutant(
        "what-was-cut-off-of-a-journal-stays-behind-the-next-word", REVIVAL, "record/journal.py",
        "            self._file.seek(self._size)\n            self._file.truncate()\n",
        "            self._file.seek(self._size)\n",
        ("tests/core/test_memory.py::test_a_writer_may_die_at_any_byte_and_the_next_goes_on_after_what_is_whole",),
    ),
    Mutant(
        "a-folder-that-was-moved-away-is-there", GONE, "record/folder.py",
        "        except OSError:\n            return True\n", "        except OSError:\n            return False\n",
        (AGAIN,),
    ),
    Mutant(
        "another-folder-in-its-place-is-the-same", GONE, "record/folder.py",
        "return (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino)", "return there.st_dev != own.st_dev",
        (AGAIN,),
    ),
    Mutant(
        "a-folder-that-is-made-again-is-anybodys", FOLDER, "record/folder.py",
        "        self.lock()\n        self.write_job(job)", "        self.write_job(job)",
        (AGAIN,),
    ),
]  # fmt: skip
