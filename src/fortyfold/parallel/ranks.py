"""The ranks of a run, and what they say to one another besides gradients: JSON and tensors, never pickles.

A run of one rank has no process group; every question is then answered at once by its own answer.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fortyfold.spec.world import World

BACKSTOP = timedelta(hours=12)  # parallel/pulse.py ends what hangs long before
CHUNK_BYTES = 64 * 2**20
Answer = TypeVar("Answer")

_BROKEN = ("Connection closed by peer", "Connection reset", "Connection refused", "Broken pipe", "Socket closed",
           "Timed out waiting", "Read error", "Write error", "NCCL")  # fmt: skip # Gloo's words, and NCCL's name


@dataclass(frozen=True)
class Ranks:
    world: World = field(default_factory=World)

    @property
    def many(self) -> bool:
        return self.world.size > 1

    @property
    def first(self) -> bool:
        """Whether this rank is the one that writes what there is once a run."""
        return self.world.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in the order of ranks, on every rank."""
        if not self.many:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.world.size, dtype=torch.int64)
        sizes[self.world.rank] = len(mine)
        dist.all_reduce(sizes)
        rows = [torch.zeros(int(sizes.max()), dtype=torch.uint8) for _ in range(self.world.size)]
        dist.all_gather(rows, torch.nn.functional.pad(mine, (0, int(sizes.max()) - len(mine))))
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def from_first(self, ask: Callable[[], Answer]) -> Answer:
        """Rank 0's answer (of JSON), on every rank; only rank 0 is asked. What it raises ends the others, too."""
        return self.gather(ask() if self.first else None)[0]  # type: ignore[no-any-return]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Added up over the ranks, in place."""
        if self.many:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace floating tensors by their means over the ranks, in place; others (counters) stay as they are."""
        if self.many:
            for chunk in _chunks([tensor for tensor in tensors if tensor.is_floating_point()]):
                with _as_one(chunk) as flat:
                    dist.all_reduce(flat)
                    flat /= self.world.size

    def copy_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace tensors by rank 0's, in place."""
        if self.many:
            for chunk in _chunks(list(tensors)):
                with _as_one(chunk) as flat:
                    dist.broadcast(flat, 0)


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one kind, so many at once that none costs a message of its own."""
    chunk: list[torch.Tensor] = []
    for tensor in tensors:
        alike = not chunk or (chunk[0].dtype, chunk[0].device) == (tensor.dtype, tensor.device)
        if chunk and (not alike or sum(each.nbytes for each in chunk) + tensor.nbytes > CHUNK_BYTES):
            yield chunk
            chunk = []
        chunk.append(tensor)
    if chunk:
        yield chunk


@contextmanager
def _as_one(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """One tensor with all their elements; what becomes of it becomes of them."""
    with torch.no_grad():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        yield flat
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def world_from_environment() -> World:
    """The world as torchrun tells it; one rank without torchrun."""
    return World(size=int(os.environ.get("WORLD_SIZE", "1")), rank=int(os.environ.get("RANK", "0")))


@contextmanager
def joined(seed: int = 0) -> Iterator[Ranks]:
    """Meet the other ranks that torchrun started, if there are any; part with them at the end.

    On a GPU gradients go by NCCL; what is said besides goes by Gloo, which the GPU need not know of. Where somebody has
    made a process group already, that is used, and left.
    """
    if dist.is_initialized():
        ranks = group_ranks()
        yield Ranks(replace(ranks.world, seed=seed))
        return
    world = replace(world_from_environment(), seed=seed)
    if world.size == 1:
        yield Ranks(world)
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=BACKSTOP)
    yield Ranks(replace(group_ranks().world, seed=seed))
    dist.destroy_process_group()  # not after an error: it may wait for ranks that are gone


def is_broken_connection(error: BaseException) -> bool:
    """Whether it tells of another rank's end rather than of a mistake here."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _BROKEN)


def group_ranks() -> Ranks:
    """The ranks of a process group that somebody else has made."""
    if not dist.is_initialized():
        return Ranks()
    world = World(size=dist.get_world_size(), rank=dist.get_rank())
    nodes = Counter(Ranks(world).gather(int(os.environ.get("GROUP_RANK", "0"))))
    return Ranks(replace(world, node_sizes=tuple(nodes[node] for node in sorted(nodes))))
