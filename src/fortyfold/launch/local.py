"""A run of several ranks on this host."""

from collections.abc import Callable
from typing import Any

from fortyfold.launch.attempt import run_attempt
from fortyfold.launch.environment import worker_environment
from fortyfold.launch.supervise import Ended, require_hope, supervise, taking_over
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.failure import Ending
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag

WORKER = "fortyfold.api.worker"


def run_once(job: dict[str, Any], procs: int, attend: Callable[[], None]) -> None:
    """Run workers for work that is done in one go; a failure is an error, and nothing is tried again."""
    ending = run_attempt(WORKER, procs, worker_environment(job, procs), attend)
    if ending != Ending():
        raise RunFailed(require_hope(None, ending, idle=1, stopping=False))


def run_local(
    run_dir: RunDir,
    job: dict[str, Any],
    procs: int,
    stop: StopFlag,
    *,
    module: str = WORKER,
    say: Callable[[str], object] = print,
) -> Ended:
    """Run `procs` workers (`python -m module`, the job in FORTYFOLD_JOB) until the run ends (launch/supervise.py)."""
    environment = worker_environment(job, procs)
    with taking_over(run_dir):
        return supervise(run_dir, lambda attend: run_attempt(module, procs, environment, attend), stop, say)
