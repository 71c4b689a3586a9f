"""The addresses of this machine, and the one by which the others of a run reach it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
from pathlib import Path

from mmlaunch.launch.store import Address
from mmplan.errors import InvalidInputError

# Linux's sockios.h: the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915
LOOPBACK = "127.0.0.1"


def parse_endpoint(endpoint: str, option: str = "--rdzv-endpoint") -> Address:
    """HOST:PORT, which an option gave, as two.

    Raises:
        InvalidInputError: it is none.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInputError(
            f"{option} {endpoint}: no HOST:PORT", hint=f"as in {option} node0:29400"
        )
    return host.strip("[]"), int(port)


def of_first_machine(endpoint: Address, local_addr: str | None) -> str:
    """The address on which machine 0 is reached.

    Debian and Ubuntu map a machine's own name to 127.0.1.1, where nobody else reaches it: then it
    is that of the one interface to a network.

    Args:
        endpoint: that all machines were told.
        local_addr: that the user says.

    Raises:
        InvalidInputError: no such name, or several interfaces could be meant.
    """
    host = endpoint[0]
    if local_addr is not None:
        return local_addr
    try:
        address = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise InvalidInputError(
            f"--rdzv-endpoint {host}: no address has this name: {error.strerror}",
            hint="name machine 0 as the others know it, or give its address",
        ) from error
    if not _is_loopback(str(address)) or host in (str(address), "localhost"):
        return str(address)
    outside = [one for one in interfaces().values() if not _is_loopback(one)]
    if len(outside) != 1:
        raise InvalidInputError(
            f"{host} is {address} on this machine, where no other machine reaches it"
            + (f"; its own are {', '.join(outside)}" if outside else ""),
            hint="say which address is meant: --local-addr ADDRESS",
        )
    return outside[0]


def toward(endpoint: Address) -> str | None:
    """The address of this machine's interface that reaches another; None where none does."""
    with contextlib.suppress(OSError):
        family, kind, *_, target = socket.getaddrinfo(*endpoint, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # asks the routing table, and sends nothing
            return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str:
    """The name of the interface that has an address.

    Raises:
        InvalidInputError: none of this machine has it.
    """
    if _is_loopback(address):
        return "lo"
    found = interfaces()
    name = next((name for name, one in found.items() if one == address), None)
    if name is None:
        raise InvalidInputError(
            f"{address} is no address of this machine, whose own are {', '.join(found.values())}",
            hint="say which address is meant: --local-addr ADDRESS",
        )
    return name


def interfaces() -> dict[str, str]:
    """Interface to its address: IPv4 where it has one, else a global one of IPv6."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                request = name.encode().ljust(256, b"\0")
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, scope, _, name = line.split()
            if scope == "00":
                found.setdefault(name, str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False
