"""The command `fortyfold`. Exit codes: 0 done, 75 stopped unfinished, 2 bad input, 1 failure.

Each verb is a module of this package that imports what it needs when it is called, so that `--help`
and the verbs that only read need no torch.
"""

import io
import os
import sys
from collections.abc import Sequence
from typing import cast

import typer

from fortyfold.cli import (
    aws,
    bench,
    completion,
    container,
    data,
    evaluate,
    logs,
    recipes,
    runs,
    sink,
    sites,
    ssh,
    stop,
    train,
    version,
    watch,
    weights,
)
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.exit_codes import BAD_INPUT, FAILED, INTERRUPTED

# The parser's own errors. (Their class is not exported; it is the one above BadParameter's usage error.)
_USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[2])

app = typer.Typer(
    name="fortyfold",
    help="Train ImageNet-class models on a CPU, a workstation or a cluster, and see where the time went.",
    add_completion=False,  # cli/completion.py has options that need no detection of the shell
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(completion.completion)
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(runs.runs)
app.command()(watch.watch)
app.command()(logs.logs)
app.command()(stop.stop)
app.command()(ssh.ssh)
app.command()(sink.sink)
app.add_typer(recipes.app, name="recipes")
app.add_typer(sites.app, name="sites")
app.add_typer(container.app, name="container")
app.add_typer(data.app, name="data")
app.add_typer(weights.app, name="weights")
app.add_typer(bench.app, name="bench")
app.add_typer(aws.app, name="aws")
app.command()(version.version)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; gives the exit code. A user's mistake is one line on stderr."""
    try:
        code = int(app(list(arguments) or ["--help"], prog_name="fortyfold", standalone_mode=False) or 0)
        return _complain("interrupted", code) if code == INTERRUPTED else code
    except UserError as error:
        return _complain(str(error), BAD_INPUT)
    except RunFailed as error:
        return _complain(str(error), FAILED)
    except _USAGE_ERROR as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if "\n" in message:  # a group of commands was called without one: the message is its help
            print(message, file=sys.stderr)
            return BAD_INPUT
        return _complain(f"{message.rstrip('.')} (see {_help_for(error)})", BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone; so is the need for it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "cannot go on"
        return _complain(f"{name}: {error.strerror or error}", BAD_INPUT)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):  # a file's name may be no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def _complain(message: str, exit_code: int) -> int:
    print(f"fortyfold: {' '.join(message.split())}", file=sys.stderr)
    return exit_code


def _help_for(error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context else 'fortyfold'} --help"
