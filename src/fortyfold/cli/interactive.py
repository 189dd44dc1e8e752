"""`fortyfold train --on SITE --interactive`: in the foreground, in an allocation that is there or asked for now."""

from typing import TYPE_CHECKING

from fortyfold.cli.display import Display
from fortyfold.cli.following import describe_state, exit_code
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag, write_request

if TYPE_CHECKING:
    from fortyfold.launch.contract import Rendered
    from fortyfold.launch.plan import Plan

POLL_SECONDS = 0.2


def run_interactively(plan: "Plan", rendered: "Rendered") -> int:
    """Until the job's script ends. A signal asks the run to save and stop; it is not sent to the nodes."""
    from subprocess import TimeoutExpired

    from fortyfold.launch.kinds import slurm

    run_dir, stop, asked = RunDir(plan.run), StopFlag().listen(), False
    with Display(run_dir, plan.job["recipe"]["log"]["every_steps"]), slurm.run_interactively(rendered) as process:
        while True:
            try:
                code = process.wait(POLL_SECONDS)
                break
            except TimeoutExpired:
                if stop.requested and not asked:
                    asked = True
                    write_request(run_dir, stop)
                    if not run_dir.is_locked():  # nothing has begun that would save
                        process.terminate()
    print(describe_state(run_dir), flush=True)
    if not run_dir.ended.exists():
        raise UserError(f"no allocation was had, or it ended at once (exit code {code})")
    return exit_code(run_dir)
