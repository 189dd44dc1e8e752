"""The two ways in which a command ends badly, each shown as one line and no traceback."""


class UserError(ValueError):
    """Bad input: says what is wrong, where, and what to do. The command exits with 2."""


class RunFailed(RuntimeError):
    """The input was fine but the run could not go on (disk full, loss not finite…). Exit code 1."""
