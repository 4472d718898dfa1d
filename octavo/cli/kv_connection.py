"""A block store for the length of a with block: the one that runs, or one that is started for the folder. Used by `octavo kv`.

Knows the lock file of a disk folder and how to start a process. Does not know what is asked of the store.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from common.errors import StartupError
from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity, aio_channel
from octavo.cli.console import say
from octavo.cli.services import Service
from octavo.cli.stack import Stack
from octavo.kvstore.v1 import kv_store_admin_service_pb2_grpc as admin_grpc
from octavo.kvstore.v1 import kv_store_service_pb2_grpc as pb_grpc

_SHM_BYTES = 256 << 20
_DEFAULT_DISK_BYTES = 64 << 30


@dataclass(frozen=True)
class KvStore:
    """Stubs of a store that answers."""

    blocks: "pb_grpc.KvStoreServiceAsyncStub"
    admin: "admin_grpc.KvStoreAdminServiceAsyncStub"
    metadata: tuple[tuple[str, str], ...]


@asynccontextmanager
async def block_store(store: str, disk_dir: Path, token: str) -> AsyncIterator[KvStore]:
    """The store at an address, or the one that has the folder, or one that is started for the folder and stopped again.

    Args:
        store: its address; empty: found by the folder.
        disk_dir: folder of the disk tier.
        token: bearer token of a store that runs.

    Raises:
        StartupError: there is neither a store nor a folder, or it cannot be started.
    """
    running, folder = _look(store, disk_dir)
    if running:
        async with _connected(Address.parse(running), token) as connected:
            yield connected
        return
    runtime = Path(tempfile.mkdtemp(prefix="octavo-"))
    stack = Stack([_service(runtime, folder)], lambda name, line: None, lambda text: None)
    say(f"no block store runs; one is started for {disk_dir}")
    try:
        await stack.start()
        async with _connected(Address.parse(f"unix:{runtime}/kvstore.sock"), "") as connected:
            yield connected
    finally:
        await stack.stop()
        shutil.rmtree(runtime, ignore_errors=True)


def _look(store: str, disk_dir: Path) -> tuple[str, Path]:
    """The address of a store that runs, or an empty one; and the folder."""
    folder = disk_dir.expanduser()
    running = store or address_of_owner(folder)
    if not running and not folder.is_dir():
        raise StartupError(f"no block store runs and there is no folder {disk_dir}; name one with --store or --disk-dir")
    return running, folder


def address_of_owner(disk_dir: Path) -> str:
    """Where the store listens that has a folder of a disk tier; empty: no store has it."""
    try:
        lock = os.open(disk_dir / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StartupError(f"{disk_dir}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(lock, 4096, 0).decode(errors="replace").strip()
    finally:
        os.close(lock)
    return ""


def _service(runtime: Path, disk_dir: Path) -> Service:
    """A store that takes no part of the folder away, however full the disk is."""
    ours = sum(path.stat().st_size for path in disk_dir.glob("*.kv"))
    stat = os.statvfs(disk_dir)
    capacity = max(ours, min(_DEFAULT_DISK_BYTES, (ours + stat.f_bavail * stat.f_frsize) // 2))
    address = Address.parse(f"unix:{runtime}/kvstore.sock")
    flags = ("--listen", address.target, "--shm-socket", f"{runtime}/shm.sock", "--capacity-bytes", str(_SHM_BYTES))
    return Service(
        "kvstore", ("-m", "kvstore_svc", *flags, "--disk-dir", str(disk_dir), "--disk-capacity-bytes", str(capacity)), address
    )


@asynccontextmanager
async def _connected(address: Address, token: str) -> AsyncIterator[KvStore]:
    security = ChannelSecurity(token=token)
    channel: grpc.aio.Channel = aio_channel(address, security)
    async with channel:
        blocks: pb_grpc.KvStoreServiceAsyncStub = pb_grpc.KvStoreServiceStub(channel)
        admin: admin_grpc.KvStoreAdminServiceAsyncStub = admin_grpc.KvStoreAdminServiceStub(channel)
        yield KvStore(blocks, admin, security.metadata())
