"""How many processes train together. (Ranks and node layout join here when there is more than one.)"""

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    size: int = 1
