"""The worker's last word: why it failed, in the file that torchrun reads when a worker has ended badly.

The layout is torchelastic's, with ours beside it under "fortyfold". The first word holds: what fails after that is a
consequence. Without torchrun nothing is written.
"""

import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.failure import Failure, Kind, one_line
from fortyfold.spec.run_dir import write_atomically

OURS = "fortyfold"
TRACEBACK_CHARACTERS = 20_000
_writing = threading.Lock()


def report(error: BaseException, kind: Kind | None = None, ranks: tuple[int, ...] = ()) -> Failure:
    """Write down `error` as this rank's failure. Does not raise: a full disk must not hide why.

    `kind` is found from the error when none is given; "consequence" and its `ranks` are for a caller who knows better.
    """
    failure = describe(error, kind, ranks)
    write(failure)
    return failure


def describe(error: BaseException, kind: Kind | None = None, ranks: tuple[int, ...] = ()) -> Failure:
    """The failure that `error` is."""
    trace = "".join(traceback.format_exception(error))
    return Failure(
        rank=own_rank(),
        kind=kind or _kind_of(error),
        message=one_line(str(error) if isinstance(error, UserError | RunFailed) else _name(error)),
        ranks=ranks,
        traceback=trace[-TRACEBACK_CHARACTERS:],
        time=time.time(),
        process=os.getpid(),
        exit_code=1,
    )


def write(failure: Failure) -> None:
    """Write a failure to torchrun's file, whole or not at all, unless there is one already."""
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not place:
        return
    with _writing, suppress(OSError):
        if not Path(place).exists():
            write_atomically(Path(place), json.dumps(_file_data(failure)).encode())


def end_process(failure: Failure) -> NoReturn:
    """Write the failure, say it on stderr, and end this process at once, whatever its threads are waiting for."""
    write(failure)
    with suppress(OSError, ValueError):
        print(f"rank {failure.rank}: {failure.message}", file=sys.stderr, flush=True)
    os._exit(1)


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _file_data(failure: Failure) -> dict[str, Any]:
    extra = {"py_callstack": failure.traceback or failure.message, "timestamp": str(int(failure.time))}
    return {"message": {"message": failure.message, "extraInfo": extra}, OURS: failure.to_json()}


def _kind_of(error: BaseException) -> Kind:
    if isinstance(error, UserError):
        return "UserError"
    return "RunFailed" if isinstance(error, RunFailed) else "exception"


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
