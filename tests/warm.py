"""The program `fortyfold` for tests that start it dozens of times, without importing torch and timm each time.

A server has imported what others made (torch, timm, ...) and of fortyfold next to nothing. A small program named
`fortyfold` sends it its command line, folder, environment and open files; the server forks a process that takes them
over, imports fortyfold and is that command: it ends as the real program does. tests/test_docs.py runs that one, too.
"""

import atexit
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(request)
    server.shutdown(socket.SHUT_WR)
    code = server.recv(8).decode()
sys.exit(int(code) if code else "the server is gone")
"""


@contextmanager
def warm_program(folder: Path) -> Iterator[Path]:
    """Makes `folder`/fortyfold and serves it."""
    program = folder / "fortyfold"
    with ExitStack() as stack:
        address = f"{stack.enter_context(TemporaryDirectory())}/s"  # of sockets' addresses only 107 bytes count
        program.write_text(CLIENT.format(python=sys.executable, address=address))
        program.chmod(0o755)
        server = stack.enter_context(subprocess.Popen([sys.executable, __file__, address], stdout=subprocess.PIPE))
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        try:
            yield folder
        finally:
            server.terminate()


def serve(address: str) -> None:
    """Returns only in a process that is to run a command."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(1, b"ready\n")
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
            while _reap():
                pass
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    request = bytearray()
    while len(request) < int.from_bytes(length, "big"):
        request += connection.recv(1 << 20)
    if command := os.fork():
        for descriptor in files:
            os.close(descriptor)
        connection.sendall(str(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])).encode())
        os._exit(0)
    connection.close()
    for target, descriptor in enumerate(files):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.argv, place, environment = json.loads(request)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def run_and_end() -> None:
    """As an interpreter ends, but without taking torch's modules apart, which takes longer than most commands."""
    from fortyfold.cli.main import main

    try:
        main()
    except SystemExit as error:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(error.code or 0))


if __name__ == "__main__":
    from fortyfold.spec.openmp import calm

    calm(os.environ)
    for module in ("pydantic", "typer", "rich.progress", "PIL.Image", "torch._dynamo", "fortyfold.models.timm_import"):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is never looked at need not be copied
    serve(sys.argv[1])
    run_and_end()
