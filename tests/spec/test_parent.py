"""Processes that die with their parent."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from fortyfold.spec.parent import PARENT, die_with_parent

CHILD = """
import os, time
from fortyfold.spec.parent import die_with_parent
die_with_parent()
print(os.getpid(), flush=True)
"""
PARENT_OF_CHILD = """
import os, subprocess, sys, time
from fortyfold.spec.parent import parent_variable
environment = os.environ | parent_variable()
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment, start_new_session=True)
time.sleep(60)
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's kernel does it")


def start(*code: str, **variables: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, **variables}
    return subprocess.Popen([sys.executable, "-c", *code], stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("then", ["time.sleep(60)", "os.execvp('sleep', ['sleep', '60'])", "os.kill(0, 19)"])
def test_a_child_of_a_killed_parent(then: str) -> None:
    """One that sleeps, one that is another program by now, one that is stopped."""
    with start(PARENT_OF_CHILD, CHILD + then) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.2)
        parent.kill()
    deadline = time.monotonic() + 5
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_parent_that_is_gone_already() -> None:
    with start(CHILD, **{PARENT: "1"}) as child:
        assert child.wait() == -signal.SIGKILL


def test_without_a_word_from_the_parent_nobody_dies() -> None:
    with start(CHILD) as child:
        assert child.wait() == 0


def test_children_of_the_child_have_another_parent() -> None:
    code = CHILD + f"print(os.environ.get({PARENT!r}))"
    with start(code, **{PARENT: str(os.getpid())}) as child:
        assert child.stdout is not None and child.stdout.read().split()[1] == "None"


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv(PARENT, "1")
    die_with_parent()
    assert PARENT not in os.environ
