"""Killing a command at random moments, and whether the same command then finishes the work."""

import hashlib
import random
import subprocess
import sys
from pathlib import Path


def finish_despite_kills(num_kills: int, *arguments: object, most_seconds: float = 2.0) -> None:
    """Run a command line, kill -9 it at `num_kills` random moments, then let it finish."""
    command = [sys.executable, "-m", "fortyfold", *map(str, arguments)]
    moments = random.Random(repr(arguments))
    for _ in range(num_kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(moments.uniform(0.3, most_seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    subprocess.run(command, check=True, capture_output=True)


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`, by its path; locks hold nothing and are left out."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".making"
    }
