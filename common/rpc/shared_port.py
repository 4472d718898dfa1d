"""One TCP address for several processes of one server, and for no other server. Knows sockets; serves nothing.

The kernel spreads new connections over all sockets that listen with SO_REUSEPORT on an address. It would also let a second
server of the same user in, so that each got half of the calls: a name that only one process can hold keeps it out.
"""

import socket

from common.errors import StartupError
from common.rpc.address import Address


class SharedPort:
    """A reserved address.

    Attributes:
        address: with the port that was chosen.
    """

    def __init__(self, address: Address, sockets: list[socket.socket]):
        self.address = address
        self._sockets = sockets

    @classmethod
    def reserve(cls, address: Address) -> "SharedPort":
        """Takes the address; processes of this user may listen on it with SO_REUSEPORT from now on.

        Raises:
            StartupError: another server listens there, or the address cannot be bound.
        """
        host, _, port = address.target.rpartition(":")
        sockets: list[socket.socket] = []
        try:
            if port != "0":
                # In the abstract namespace, which ends with the process and is per network namespace, as ports are.
                sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                sockets[0].bind(f"\0octavo/shared-port/{address.target}")
                with _bound(host, port, shared=False):  # refused where anybody listens
                    pass
            sockets.append(_bound(host, port, shared=True))
        except OSError as error:
            for opened in sockets:
                opened.close()
            raise StartupError(f"cannot listen on {address.target}: the address is in use or cannot be bound") from error
        return cls(Address(f"{host}:{sockets[-1].getsockname()[1]}"), sockets)

    def close(self) -> None:
        """Gives it back."""
        for opened in self._sockets:
            opened.close()


def _bound(host: str, port: str, *, shared: bool) -> socket.socket:
    """A socket that is bound and never listens, so that no connection comes to it."""
    family, kind, protocol, _, sockaddr = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(sockaddr)
    except OSError:
        bound.close()
        raise
    return bound
