"""The exit codes of the command and of all that it starts on nodes."""

TRAINED = 0
FAILED = 1
BAD_INPUT = 2
STOPPED = 75
"""Unfinished, and saved: the same command goes on."""
INTERRUPTED = 130
