"""What one TCP connection from a host to another gets through: the most that messages between them can reach."""

import subprocess
import sys

from hosts import Host

RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
buffer, taken = bytearray(1 << 20), 0
connection.recv_into(buffer)
started = time.perf_counter()
while part := connection.recv_into(buffer):
    taken += part
print(taken / (time.perf_counter() - started))
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
end = time.perf_counter() + float(sys.argv[3])
while time.perf_counter() < end:
    connection.sendall(bytes(1 << 18))
"""


def goodput(sender: Host, receiver: Host, seconds: float = 2.0) -> float:
    """Bytes a second, without headers."""
    listener = receiver.start([sys.executable, "-c", RECEIVE, receiver.address], stdout=subprocess.PIPE)
    assert listener.stdout is not None
    port = listener.stdout.readline().strip()
    sender.run([sys.executable, "-c", SEND, receiver.address, port, str(seconds)])
    return float(listener.communicate()[0])
