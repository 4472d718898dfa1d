"""A session's socket past the front: nobody else can reach it, and nothing of it stays behind."""

import asyncio
import stat
from pathlib import Path

import pytest

from common.shm.host import host_id
from executor_svc.line_offer import LineOffer


async def test_a_process_of_this_user_gets_through_once_the_path_is_known(tmp_path: Path) -> None:
    offer = LineOffer(tmp_path)
    message = offer.message
    assert message.host_id == host_id()
    folder = Path(message.socket_path).parent
    assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700

    _, writer = await asyncio.open_unix_connection(message.socket_path)
    with await offer.accept() as connection:
        writer.write(b"hello")
        await writer.drain()
        assert connection.recv(5) == b"hello"
    writer.close()
    offer.close()
    assert not folder.exists()


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        LineOffer(tmp_path / "missing")
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    with pytest.raises(OSError):
        LineOffer(deep)
    assert list(deep.iterdir()) == []
