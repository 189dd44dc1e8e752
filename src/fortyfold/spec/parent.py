"""No orphans: a process that ends when the one that started it ends, however that happened.

The kernel does it (Linux: prctl PR_SET_PDEATHSIG), so it holds for a parent killed with SIGKILL and for a child that
is stopped. Elsewhere nothing happens. The parent's pid comes through the environment: a parent that was gone before
the child asked is noticed, too.
"""

import ctypes
import os
import signal
import sys

PARENT = "FORTYFOLD_PARENT"
_PR_SET_PDEATHSIG = 1


def parent_variable() -> dict[str, str]:
    """What a parent adds to the environment of its children."""
    return {PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """SIGKILL for this process when its parent ends; at once if it has ended. Survives execve, not a fork.

    To be called early, in the main thread. The parent is the *thread* that started this process, so that should be one
    that stays. The variable is taken out of the environment: children of this process have another parent.
    """
    expected = os.environ.pop(PARENT, None)
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) is refused")
    if expected is not None and os.getppid() != int(expected):
        os.kill(os.getpid(), signal.SIGKILL)
