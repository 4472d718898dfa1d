"""Asks a server for its health, for containers and scripts: python -m common.rpc.probe ADDRESS [SERVICE].

Knows the standard health protocol only. Exits with 0 when the server says SERVING, 1 when it says anything else or nothing,
2 when the question makes no sense.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import StartupError
from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity, sync_channel


def probe(address: Address, service: str = "", *, timeout_s: float = 3.0, security: ChannelSecurity | None = None) -> str:
    """One health check.

    Args:
        address: of the server.
        service: full name of one of its services; empty: the server as a whole.
        timeout_s: longest wait for the answer.
        security: for servers with TLS.

    Returns:
        "SERVING", "NOT_SERVING" and so on; "SERVICE_UNKNOWN" when the server lacks the service; "UNREACHABLE".
    """
    with sync_channel(address, security) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its published types lack the methods
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            return "SERVICE_UNKNOWN" if code is grpc.StatusCode.NOT_FOUND else "UNREACHABLE"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(argv: Sequence[str]) -> int:
    """Reads the command line, prints the status, returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m common.rpc.probe", description="Asks a gRPC server for its health.")
    parser.add_argument("address", help="host:port or unix:/path")
    parser.add_argument("service", nargs="?", default="", help="full name of a service; left out: the server as a whole")
    parser.add_argument("--timeout-s", type=float, default=3.0, help="longest wait for the answer")
    parser.add_argument("--tls-ca", type=Path, help="PEM file of the authority to trust, for servers with TLS")
    arguments = parser.parse_args(argv)
    try:
        address = Address.parse(arguments.address)
    except StartupError as error:
        print(error.message, file=sys.stderr)
        return 2
    security = ChannelSecurity(tls_ca=arguments.tls_ca)
    status = probe(address, arguments.service, timeout_s=arguments.timeout_s, security=security)
    print(f"{arguments.address} {arguments.service or '(server)'} {status}")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
