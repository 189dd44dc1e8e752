"""Training on a site in the foreground: this command stays, shows the run, and passes a stop on."""

import sys
import time
from typing import TYPE_CHECKING

from fortyfold.cli.display import Display
from fortyfold.cli.following import describe_state
from fortyfold.spec.exit_codes import STOPPED, TRAINED
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag

if TYPE_CHECKING:
    from fortyfold.launch.contract import Launcher, Rendered
    from fortyfold.launch.plan import Plan


def train_in_foreground(launcher: "Launcher", plan: "Plan", rendered: "Rendered", run_dir: RunDir) -> int:
    """Until it is over; gives the exit code."""
    stop, started = StopFlag().listen(), time.time()
    with Display(run_dir, plan.job["recipe"]["log"]["every_steps"]) as display:
        code = launcher.run(plan, rendered, run_dir, stop, display.say)
    if code not in (TRAINED, STOPPED):
        _repeat_complaints(run_dir, started)
    print(describe_state(run_dir), flush=True)
    return code


def _repeat_complaints(run_dir: RunDir, since: float) -> None:
    """What the nodes of a failed run had to complain of stands in their logs."""
    for log in sorted(run_dir.logs.glob("job-*.log")):
        if log.stat().st_mtime >= since:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            for line in dict.fromkeys(line for line in lines if line.startswith("fortyfold: ")):
                print(line, file=sys.stderr)
