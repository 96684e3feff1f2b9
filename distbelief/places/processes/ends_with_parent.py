"""Parent-death signal: the process that imports this module is killed when the thread that started it ends.

The forkserver uses it: otherwise it would notice the end only after importing torch, and would then tear torch down.
"""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1

ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
parent = os.getppid()
if int(os.environ.pop("DISTBELIEF_STARTED_BY", parent)) != parent:  # the parent ended before the signal was set
    os.kill(os.getpid(), signal.SIGKILL)
