"""Mutants of what is kept: checkpoints, the run folder, the journal, and what is read back."""

from mutants import Mutant

CHECKPOINT = "A checkpoint is whole or not there"
RECUT = "A checkpoint goes on with another number of shards"
FOLDER = "Two jobs never write into one run folder"
REVIVAL = "A coordinator that is killed is started anew"
GARBAGE = "Garbage on a link costs that link only"
PICKLE = "Nothing is ever unpickled"
FILES = "tests/core/test_record_checkpoints.py::"

MUTANTS = [
    Mutant(
        "what-was-made-of-a-checkpoint-stays",
        CHECKPOINT,
        "record/checkpoints.py",
        "            self.discard(number)\n            last",
        "            last",
        (FILES + "test_a_disk_that_fills_at_any_sync_leaves_the_last_good_checkpoint",),
    ),
    Mutant(
        "a-checkpoint-is-not-written-through",
        CHECKPOINT,
        "record/checkpoints.py",
        "    sync(path)\n    return CheckpointFile(path.name",
        "    return CheckpointFile(path.name",
        (FILES + "test_a_disk_that_fills_at_any_sync_leaves_the_last_good_checkpoint",),
    ),
    Mutant(
        "older-checkpoints-go-before-the-new-one-is-there",
        CHECKPOINT,
        "record/checkpoints.py",
        '        making, final = self._making(number), self.folder / f"{number:06d}"\n',
        '        making, final = self._making(number), self.folder / f"{number:06d}"\n        self._tidy(number, 0)\n',
        (FILES + "test_a_disk_that_fills_at_any_sync_leaves_the_last_good_checkpoint",),
    ),
    Mutant(
        "the-checksum-of-a-manifest-is-not-looked-at",
        GARBAGE,
        "record/checkpoints.py",
        "if zlib.crc32(outer.manifest) != outer.crc32:",
        "if not outer.crc32:",
        (FILES + "test_a_flipped_or_cut_off_byte_is_only_ever_a_checkpoint_error",),
        seconds=8,
    ),
    Mutant(
        "the-checksum-of-a-part-is-not-looked-at",
        GARBAGE,
        "record/restore.py",
        "if checksum(file) != part.crc32:",
        "if not part.crc32:",
        (FILES + "test_a_flipped_or_cut_off_byte_is_only_ever_a_checkpoint_error",),
        seconds=8,
    ),
    Mutant(
        "two-jobs-share-a-folder",
        FOLDER,
        "record/folder.py",
        "held = _locked(descriptor, fcntl.LOCK_EX, LOOKS)",
        "held = _locked(descriptor, fcntl.LOCK_SH, LOOKS)",
        ("tests/core/test_record_folder.py::test_one_job_at_a_time_has_a_folder",),
    ),
    Mutant(
        "a-child-of-a-job-lets-go-of-its-folder",
        FOLDER,
        "record/folder.py",
        "self._let_go.atexit = False",
        "self._let_go.atexit = True",
        ("tests/core/test_record_folder.py::test_a_lock_dies_with_its_process_and_not_with_a_child_of_it[forks]",),
    ),
    Mutant(
        "what-the-coordinator-missed-is-not-told-again",
        REVIVAL,
        "runtime/lasting.py",
        "        for message in missed:\n            self._endpoint.send(COORDINATOR, message)",
        "        for message in missed[1:]:\n            self._endpoint.send(COORDINATOR, message)",
        ("tests/simulated/test_revival.py::test_a_coordinator_may_die_at_any_message",),
        seconds=15,
    ),
    Mutant(
        "what-the-coordinator-had-said-is-not-told-again",
        REVIVAL,
        "runtime/lasting.py",
        "        for message in missed:\n            self._endpoint.send(role, message)",
        "        for message in missed[:0]:\n            self._endpoint.send(role, message)",
        ("tests/simulated/test_revival.py::test_a_coordinator_may_die_at_any_message",),
        seconds=15,
    ),
    Mutant(
        "a-journal-that-was-cut-off-is-not-gone-through",
        REVIVAL,
        "record/journal.py",
        "    while end := _end(data, last):\n        last = end\n",
        "    if _end(data, last):\n        last = len(data)\n",
        ("tests/core/test_memory.py::test_a_writer_may_die_at_any_byte_and_the_next_goes_on_after_what_is_whole",),
    ),
    Mutant(
        "an-old-file-of-weights-is-unpickled",
        PICKLE,
        "record/restore.py",
        '        remedy = (\n            "name a run',
        '        if source.suffix == ".pt":\n            return torch.load(source, weights_only=False)\n'
        '        remedy = (\n            "name a run',
        (
            "tests/core/test_house.py::test_nothing_is_unpickled",
            FILES + "test_what_is_no_checkpoint_is_refused_and_never_unpickled[pickle]",
        ),
    ),
    Mutant(
        "a-piece-of-another-split-is-read-from-the-beginning",
        RECUT,
        "record/parts.py",
        ".narrow(own.dimension, own.start,",
        ".narrow(own.dimension, 0,",
        (FILES + "test_a_checkpoint_of_a_split_model_goes_on_with_another_split_or_none",),
    ),
    Mutant(
        "pieces-of-another-split-are-put-together-along-its-own-dimension",
        RECUT,
        "record/parts.py",
        "own, along = entry.piece, wanted[0].entry.piece.dimension",
        "own, along = entry.piece, entry.piece.dimension",
        (FILES + "test_a_checkpoint_of_a_split_model_goes_on_with_another_split_or_none",),
    ),
]
