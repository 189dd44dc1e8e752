"""What is asked of a node, and how people write it: "v100:4", "250gb", "1-12:00:00"."""

import re
from dataclasses import dataclass

_UNITS_MIB = {
    "m": 1,
    "mb": 1,
    "mib": 1,
    "g": 1024,
    "gb": 1024,
    "gib": 1024,
    "t": 1024**2,
    "tb": 1024**2,
    "tib": 1024**2,
}


@dataclass(frozen=True)
class Gpus:
    count: int
    type: str | None = None

    def __str__(self) -> str:
        return f"{self.type}:{self.count}" if self.type else str(self.count)


@dataclass(frozen=True)
class NodeShape:
    """One node, as it is asked for."""

    procs: int
    gpus: Gpus = Gpus(0)
    cpus: int | None = None
    memory_mib: int | None = None


def parse_gpus(text: int | str | Gpus) -> Gpus:
    """4, "4" or "v100:4"; a ValueError says how to write it."""
    if isinstance(text, Gpus):
        return text
    match = re.fullmatch(r"(?:([A-Za-z0-9_.-]+):)?(\d{1,4})", str(text), re.ASCII)
    if not match or (match[1] and not int(match[2])):
        raise ValueError(f'{text!r} is neither a count of GPUs nor type and count, such as "v100:4"')
    return Gpus(int(match[2]), match[1])


def parse_memory(text: str) -> int:
    """MiB of "250gb", "64G" or "500mb"."""
    match = re.fullmatch(r"(\d{1,9})\s?([a-z]+)", text.lower(), re.ASCII)
    if not match or match[2] not in _UNITS_MIB or not int(match[1]):
        raise ValueError(f'{text!r} is no amount of memory, such as "250gb"')
    return int(match[1]) * _UNITS_MIB[match[2]]


def memory_text(mib: int) -> tuple[int, str]:
    """(number, unit) with the largest of the units g and m that leaves no fraction."""
    return (mib // 1024, "g") if mib % 1024 == 0 else (mib, "m")


def parse_seconds(text: str) -> int:
    """Seconds of "30:00", "1:00:00" or "2-00:00:00"."""
    match = re.fullmatch(r"(?:(?:(\d{1,4})-)?(\d{1,4}):)?(\d{1,2}):(\d\d)", text, re.ASCII)
    if not match:
        raise ValueError(f'{text!r} is no time limit, such as "30:00", "1:00:00" or "2-00:00:00"')
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise ValueError("a time limit of nothing")
    return total


def clock_text(seconds: int) -> str:
    """HH:MM:SS, with as many hours as it takes: what Slurm and PBS both read."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
