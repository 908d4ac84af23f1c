"""Start the process that ranks are forked from before anything slow is imported.

It imports torch (2-3 s) on another core while the command that needs the ranks does so itself, so
this module and what it imports stay free of torch.
"""

import multiprocessing
import signal
from multiprocessing import forkserver

_AS_HELPER = "paceline.comm.forkserver_process"
# What the ranks of a command need, by the full name of the module that imports all of it.
TRAINING = "paceline.train.session"
MEASURING = "paceline.bench.measure"
SERVING = "paceline.serve.ranks"


def warm_up_ranks(module: str) -> None:
    """Start it; where it runs already, do nothing.

    Args:
        module: what it imports, such as `TRAINING`.
    """
    multiprocessing.set_forkserver_preload([_AS_HELPER, module])
    # Python's resource tracker, which it starts as well, lets SIGTERM through in this thread.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
