"""Mutants of real processes: signals, deaths and what is left of them."""

from mutants import Mutant

LEFT = "No process, socket or shared-memory segment outlives a job"
LIVES = "A replica that dies is started anew"

MUTANTS = [
    Mutant(
        "an-import-may-swallow-a-ctrl-c",
        "A Ctrl-C at any moment of the command ends it",
        "cli/main.py",
        "    os._exit(INTERRUPTED)\n",
        "    raise KeyboardInterrupt\n",
        ("tests/processes/test_signals.py::test_no_import_swallows_a_ctrl_c[train digits downpour-torch]",),
        seconds=12,
    ),
    Mutant(
        "processes-of-a-job-take-sigterm",
        "A Ctrl-C at any moment of the command ends it",
        "cluster/settle.py",
        "    signal.signal(signal.SIGTERM, leave)",
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)",
        ("tests/processes/test_cli.py::test_a_signal_to_all_processes_keeps_a_checkpoint_and_the_printed_command_goes_on[downpour-SIGTERM]",),
        seconds=12,
    ),
    Mutant(
        "a-segment-stays-open",
        LEFT,
        "transport/shared.py",
        "            os.close(self._segment)\n",
        "",
        ("tests/processes/test_shared.py::test_a_push_from_outside_the_shared_memory_is_refused",),
    ),
    Mutant(
        "the-memory-of-a-job-stays-open",
        LEFT,
        "cluster/supervisor.py",
        "for descriptor in (*self._journal, *([self._memory] if self._memory >= 0 else [])):",
        "for descriptor in self._journal:",
        ("tests/processes/test_local.py::test_parameters_can_be_read_where_the_shards_hold_them",),
        seconds=10,
    ),
    Mutant(
        "a-folder-of-the-forkserver-stays",
        LEFT,
        "cluster/forkserver.py",
        'tempfile.TemporaryDirectory(prefix="distbelief-", ignore_cleanup_errors=True) as folder:',
        'contextlib.nullcontext(tempfile.mkdtemp(prefix="distbelief-")) as folder:',
        ("tests/processes/test_local.py::test_a_job_leaves_what_the_house_promises",),
        seconds=10,
    ),
    Mutant(
        "who-is-left-at-the-end-is-not-killed",
        LEFT,
        "cluster/supervisor.py",
        "        finally:\n            self._end_all()\n",
        "        finally:\n            if self.failure:\n                self._end_all()\n",
        ("tests/processes/test_deaths.py::test_an_error_of_the_supervisor_itself_leaves_nobody_behind",),
        seconds=20,
    ),
    Mutant(
        "processes-outlive-their-supervisor",
        LEFT,
        "cluster/settle.py",
        "    threading.Thread(target=_outlive_nobody, args=(descriptor,), daemon=True).start()\n",
        "",
        (
            "tests/processes/test_deaths.py::test_nobody_outlives_a_killed_supervisor[in an endless step-shared]",
            "tests/processes/test_deaths.py::test_nobody_outlives_a_killed_supervisor[in an endless step-tcp]",
        ),
        seconds=25,
    ),
    Mutant(
        "a-life-that-is-gone-begins-again",
        LIVES,
        "core/lives.py",
        "        if incarnation <= self.gone.get(role, -1):\n            raise",
        "        if incarnation < self.gone.get(role, -1):\n            raise",
        ("tests/machines/test_coordinator.py::test_the_next_life_of_a_dead_replica_takes_its_place_and_the_job_waits_for_it",),
    ),
    Mutant(
        "a-replica-has-one-life-more",
        LIVES,
        "core/lives.py",
        "if not died or incarnation >= self._restarts:",
        "if not died or incarnation > self._restarts:",
        ("tests/machines/test_coordinator.py::test_the_next_life_of_a_dead_replica_takes_its_place_and_the_job_waits_for_it",),
    ),
    Mutant(
        "the-death-of-a-former-life-ends-this-one",
        LIVES,
        "core/lives.py",
        "return incarnation >= self._here.get(role, 0)",
        "return True",
        ("tests/machines/test_coordinator.py::test_a_death_that_is_heard_of_once_the_next_life_is_there_is_not_its",),
    ),
]
