"""Options of commands that talk to a running server, and the client they make."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.client import ClientSecurity, OctavoClient

Target = Annotated[str, typer.Option("--target", envvar="OCTAVO_TARGET", help="Server: host:port or unix:/path.")]
Token = Annotated[str, typer.Option("--token", envvar="OCTAVO_TOKEN", help="Bearer token of the server.", show_default=False)]
TlsCa = Annotated[Path | None, typer.Option("--tls-ca", envvar="OCTAVO_TLS_CA", help="PEM file of the server's authority.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds until a call is given up.")]


def connect(target: str, token: str, tls_ca: Path | None, timeout_s: float = 300.0) -> OctavoClient:
    """A client for the options."""
    return OctavoClient(target, token=token, timeout_s=timeout_s, security=ClientSecurity(tls_ca=tls_ca))
