"""Running out of memory: what to say, and how a step is taken again in smaller pieces."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fortyfold.engine.learner import Learner
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.timeline import Stretch

_WORDS = ("can't allocate memory", "not enough memory", "out of memory")  # of torch's CPU allocator, and cuDNN's


class OutOfMemory(Exception):
    """The step did not fit; nothing of it is left."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


@contextmanager
def undone_when_full(learner: Learner, wanted: bool) -> Iterator[None]:
    """Raise OutOfMemory for whatever means that. If `wanted`, the learner is then as it was before, to try again.

    Only buffers (statistics of normalisation layers) and generators can have changed by then: the weights move last.
    """
    if not wanted:
        yield
        return
    buffers = list(learner.model.buffers())
    before = [buffer.clone() for buffer in buffers]
    generators = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        full = OutOfMemory(str(error).splitlines()[0] if str(error) else "")
    else:
        return
    # Out of the handler: its traceback would hold on to the step's tensors.
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    torch.set_rng_state(generators[0])
    if generators[1] is not None:
        torch.cuda.set_rng_state(generators[1])
    learner.optimizer.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise full


def advice(stretch: Stretch, model: str, accumulate: int) -> RunFailed:
    """One line: where, with how much, and what to try."""
    return RunFailed(
        f"out of memory in phase {stretch.phase}: {model} with {stretch.global_batch} images of {stretch.px} px a "
        f"step, in {accumulate} micro-batch{'es' if accumulate > 1 else ''} a rank; try --auto-accumulate, which goes "
        f"on from the last checkpoint; or start anew with accumulate = {2 * accumulate}, "
        'precision.dtype = "bf16", or a smaller px'
    )
