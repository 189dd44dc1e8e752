"""How many cores this process may use: what a scheduler or taskset left it, not what the machine has."""

import os


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
