"""Mutants of real processes: signals, deaths and what is left of them."""

from mutants import Mutant

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
]
