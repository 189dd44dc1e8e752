"""The ranks of a run, and what they say to one another besides gradients: JSON and tensors, never pickles.

A run of one rank has no process group; every question is then answered at once by its own answer.
"""

import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.world import World

BACKSTOP = timedelta(hours=12)  # parallel/pulse.py ends what hangs long before
CHUNK_BYTES = 64 * 2**20
Answer = TypeVar("Answer")

_stores: list[Store] = []  # that of the ranks' meeting point, and one for each time that they met

_BROKEN = ("Connection closed by peer", "Connection reset", "Connection refused", "Broken pipe", "Socket closed",
           "Timed out waiting", "Read error", "Write error", "NCCL")  # fmt: skip # Gloo's words, and NCCL's name


@dataclass(frozen=True)
class Ranks:
    world: World = field(default_factory=World)
    talk: dist.ProcessGroup | None = None
    """For small talk, by Gloo: the host's, whatever gradients go by."""
    far: bool = False
    """Whether this rank does not see rank 0's disk, which has the run: it is sent what it needs of it."""
    apart: bool = False
    """Whether that is so of any rank."""

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
        dist.all_reduce(sizes, group=self.talk)
        rows = [torch.zeros(int(sizes.max()), dtype=torch.uint8) for _ in range(self.world.size)]
        padded = torch.nn.functional.pad(mine, (0, int(sizes.max()) - len(mine)))
        dist.all_gather(rows, padded, group=self.talk)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def from_first(self, ask: Callable[[], Answer]) -> Answer:
        """Rank 0's answer (of JSON), on every rank; only rank 0 is asked. A UserError or RunFailed of its is raised on
        every rank; of other errors they hear when it ends."""
        answer, error = None, None
        if self.first:
            try:
                answer = ask()
            except (UserError, RunFailed) as raised:
                error = raised
        answer, told = self.gather([answer, [type(error).__name__, str(error)] if error else None])[0]
        if error is not None:
            raise error
        if told is not None:
            raise (UserError if told[0] == UserError.__name__ else RunFailed)(told[1])
        return answer  # type: ignore[no-any-return]

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
                    flat /= self.world.size  # before, so that nothing large overflows
                    dist.all_reduce(flat)

    def stream_first(self, pieces: Iterator[bytes], num_bytes: int) -> Iterator[bytes]:
        """On every rank the pieces of `num_bytes` in all that rank 0 has, CHUNK_BYTES each but the last."""
        for start in range(0, num_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, num_bytes - start)
            piece = bytearray(next(pieces)) if self.first else bytearray(size)
            tensor = torch.frombuffer(piece, dtype=torch.uint8)
            dist.broadcast(tensor, 0, group=self.talk)
            yield bytes(piece)

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
    if dist.is_initialized() or world_from_environment().size == 1:
        yield group_ranks(seed)
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(_own_gpu())
        backend = "cpu:gloo,cuda:nccl"
    world, store = world_from_environment(), _meeting_point()
    dist.init_process_group(backend, timeout=BACKSTOP, store=store, rank=world.rank, world_size=world.size)
    yield group_ranks(seed)
    dist.destroy_process_group()  # not after an error: it may wait for ranks that are gone


def find_far(ranks: Ranks, folder: Path) -> Ranks:
    """With `far` and `apart` as they are: who sees the mark that rank 0 leaves in `folder` shares its disk."""
    mark = folder / ranks.from_first(lambda: _leave_mark(folder))
    far = not mark.exists()
    apart = any(ranks.gather(far))
    if ranks.first:
        mark.unlink()
    return replace(ranks, far=far, apart=apart)


def _leave_mark(folder: Path) -> str:
    name = f"seen-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    except OSError as error:
        raise RunFailed(f"cannot write to {folder}: {error.strerror}") from None
    return name


def _own_gpu() -> int:
    number, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= there:
        raise UserError(f"{os.environ['LOCAL_WORLD_SIZE']} ranks on a machine with {there} GPUs; use fewer (--procs)")
    return number


def _meeting_point() -> Store:
    """Where torchrun says; each time under names of its own, or ranks would find those of the time before."""
    if not _stores:
        store, _, _ = next(rendezvous("env://", timeout=BACKSTOP))
        _stores.append(store)
    _stores.append(PrefixStore(f"fortyfold/group/{len(_stores)}", _stores[0]))
    return _stores[-1]


def is_broken_connection(error: BaseException) -> bool:
    """Whether it tells of another rank's end rather than of a mistake here."""
    if isinstance(error, RunFailed):  # that of a network disk, say
        return False
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _BROKEN)


def group_ranks(seed: int = 0) -> Ranks:
    """The ranks of the process group that there is; one rank where there is none. All must call it."""
    if not dist.is_initialized():
        return Ranks(World(seed=seed))
    talk = dist.new_group(backend="gloo", timeout=BACKSTOP)
    ranks = Ranks(World(dist.get_world_size(), dist.get_rank(), seed=seed), talk)
    nodes = Counter(ranks.gather(int(os.environ.get("GROUP_RANK", "0"))))
    sizes = tuple(nodes[node] for node in sorted(nodes))
    return replace(ranks, world=replace(ranks.world, node_sizes=sizes))
