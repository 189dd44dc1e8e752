"""A node's addresses and interfaces (IPv4), from the kernel; nothing is sent anywhere."""

import fcntl
import socket
import struct

from fortyfold.spec.errors import UserError

_SIOCGIFADDR = 0x8915  # Linux
_NOWHERE = "192.0.2.1"  # a documentation address: only the default route leads there


def interfaces() -> dict[str, str]:
    """The address of each interface that has one, by name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def own_addresses(interface: str | None) -> list[str]:
    """Where others may reach this node, the likeliest first; only the interface's if one is named.

    A loopback address is given only for the loopback interface by name: of several nodes each would else meet itself.
    """
    there = interfaces()
    if interface is not None:
        return [there[_known(interface, there)]]
    likely = [_named(), _source_towards(_NOWHERE), *there.values()]
    known = [address for address in dict.fromkeys(likely) if address and address in there.values()]
    addresses = [address for address in known if not _is_loopback(address)]
    if not addresses:
        raise UserError(
            f"{socket.gethostname()} has no network address that other nodes could reach; "
            "name the interface that nodes talk by in the site (interface)"
        )
    return addresses


def interface_towards(address: str, interface: str | None = None) -> str:
    """The interface by which this node reaches `address`; the named one, if one is named."""
    there = interfaces()
    if interface is not None:
        return _known(interface, there)
    source = _source_towards(address)  # towards one of its own it is that address
    for name, own in there.items():
        if own == source:
            return name
    raise UserError(f"{socket.gethostname()} has no network route to {address}; name the interface in the site")


def _known(interface: str, there: dict[str, str]) -> str:
    if interface not in there:
        raise UserError(
            f"{socket.gethostname()} has no network interface {interface} with an address; it has: {', '.join(there)}"
        )
    return interface


def _named() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _source_towards(address: str) -> str | None:
    """This node's address on packets to there. Connecting a datagram socket sends none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
