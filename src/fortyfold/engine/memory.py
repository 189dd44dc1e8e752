"""Running out of memory: what to say, and how a step is taken again in smaller pieces."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fortyfold.engine.learner import Learner
from fortyfold.spec.errors import RunFailed
from fortyfold.spec.timeline import Stretch

_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")  # CPU's, CUDA's, cuBLAS' words


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    told = isinstance(error, RunFailed)  # already, in one line
    return isinstance(error, RuntimeError) and not told and any(word in str(error) for word in _WORDS)


def remember(learner: Learner) -> Callable[[], None]:
    """Before gradients are computed: gives a function that puts the learner back as it is now, and frees what the
    failed attempt held. Only gradients, buffers (statistics of normalisation layers) and generators change there.

    To be called out of the handler of the error, whose traceback holds on to the attempt's tensors.
    """
    buffers = list(learner.model.buffers())
    before = [buffer.clone() for buffer in buffers]
    generators = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def put_back() -> None:
        learner.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        torch.set_rng_state(generators[0])
        gc.collect()
        if generators[1] is not None:
            torch.cuda.set_rng_state(generators[1])
            torch.cuda.empty_cache()

    return put_back


def advice(
    stretch: Stretch, model: str, accumulate: int, *, halved: bool = False, many_ranks: bool = False
) -> RunFailed:
    """One line: where, with how much, and what to try; `halved` when micro-batches cannot get any smaller."""
    pieces = f"{accumulate} micro-batch{'es' if accumulate > 1 else ''} a rank"
    where = (
        f"out of memory in phase {stretch.phase}: {model} with {stretch.global_batch} images of {stretch.px} px a step"
    )
    if halved:
        return RunFailed(
            f'{where}, even in {pieces}; start anew with precision.dtype = "bf16", or a smaller px or model'
        )
    alone = "" if many_ranks else "try --auto-accumulate, which goes on from the last checkpoint; or "
    return RunFailed(
        f"{where}, in {pieces}; {alone}start anew with "
        f'accumulate = {2 * accumulate}, precision.dtype = "bf16", or a smaller px'
    )


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Out of memory inside, where there are no gradients, is one line that says `what` was being done."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunFailed(f"out of memory {what}; is somebody else using it? (nvidia-smi tells)") from error
