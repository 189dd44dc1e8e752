"""Work beside a context, in a thread of its own that is over when the context is."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(name: str, work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Inside, `work` goes on; when its event is set the context is being left, which waits for it to return."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
