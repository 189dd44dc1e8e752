"""The processes that train together, which of them this one is, and on which nodes they are."""

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class World:
    """Ranks count through the nodes: those of node 0 first."""

    size: int = 1
    rank: int = 0
    node_sizes: tuple[int, ...] = ()  # ranks on each node; none: all on one
    seed: int = 0

    def nodes(self) -> list[range]:
        """The ranks of each node."""
        sizes = self.node_sizes or (self.size,)
        assert sum(sizes) == self.size and min(sizes) > 0, self
        return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

    @property
    def node(self) -> range:
        """The ranks of this one's node."""
        return next(node for node in self.nodes() if self.rank in node)
