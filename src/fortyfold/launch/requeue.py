"""A run's last word, for whoever brought it to the nodes: one line in the file `ended` of its directory.

    trained         all is done
    cancelled       somebody wanted it to stop
    failed          by its own fault; the log says how
    out of time, spot notice, lost   to be queued again
    terminated      by SIGTERM: to be queued again if the scheduler says that this was a preemption
    no progress     would be queued again, but MOST_IDLE times in a row nothing new was saved

The job's script reads it on the host, outside of any container, where the scheduler's commands are.
"""

import json

from fortyfold.spec.exit_codes import FAILED, STOPPED, TRAINED
from fortyfold.spec.run_dir import RunDir, write_atomically, write_json

AGAIN = ("out of time", "spot notice", "lost")
MAYBE_AGAIN = "terminated"
MOST_IDLE = 3


def note_end(run_dir: RunDir, word: str, start: str = "") -> str:
    """Say it, or that going on would have no point; gives what was said. The second line says which start it is of."""
    if word in (*AGAIN, MAYBE_AGAIN):
        word = _with_patience(run_dir, word)
    elif run_dir.requeues.exists():
        run_dir.requeues.unlink()
    run_dir.launch.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir.ended, f"{word}\n{start}\n".encode())
    return word


def read_exit_code(run_dir: RunDir) -> int:
    """What the train command gives for the last word; without one nothing has begun."""
    try:
        word = run_dir.ended.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return STOPPED
    return {"trained": TRAINED, "failed": FAILED}.get(word, STOPPED)


def _with_patience(run_dir: RunDir, word: str) -> str:
    saved = run_dir.saved_steps() or 0
    run_dir.launch.mkdir(parents=True, exist_ok=True)
    try:
        before = json.loads(run_dir.requeues.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {"saved_steps": 0, "idle": 0}
    idle = 0 if saved > before["saved_steps"] else before["idle"] + 1
    if idle < MOST_IDLE:
        write_json(run_dir.requeues, {"saved_steps": saved, "idle": idle})
        return word
    run_dir.requeues.unlink(missing_ok=True)  # whoever starts it again has new hope
    return f"no progress ({word})"
