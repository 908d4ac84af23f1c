"""Makes a helper of the process that imports it: the one that ranks are forked from does so first.

Signals that ask a run to stop may reach every process of it at once (scancel, a kubelet, `kill` of
a group). Were this one to follow them, nobody could tell any more how its ranks ended, so it
ignores them. And it ends with whoever started it, even by kill -9: by itself it would first finish
its imports, and wait for all that inherited its pipe. Only Linux can be asked for that; elsewhere
it ends as multiprocessing has it.
"""

import ctypes
import signal
import sys

# Of linux/prctl.h.
_PR_SET_PDEATHSIG = 1

for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(_number, signal.SIG_IGN)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
