"""The processes that train together, and which of them this one is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    size: int = 1
    rank: int = 0
