"""A file of blocks gives back what went in, and says when it is not whole."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidParameter
from octavo.kv_archive import ArchivedBlock, ArchiveWriter, read_archive

KEYS = st.binary(min_size=32, max_size=32)
BLOCKS = st.lists(
    st.builds(ArchivedBlock, KEYS, KEYS, st.binary(min_size=16, max_size=16), st.binary(min_size=1, max_size=99)), max_size=5
)


def archive(blocks: list[ArchivedBlock]) -> bytes:
    file = io.BytesIO()
    writer = ArchiveWriter(file)
    for block in blocks:
        writer.add(block)
    writer.finish()
    return file.getvalue()


@given(BLOCKS)
def test_blocks_come_back(blocks: list[ArchivedBlock]) -> None:
    assert list(read_archive(io.BytesIO(archive(blocks)), "FILE")) == blocks


@given(BLOCKS, st.data())
def test_a_file_that_was_cut_off_says_so_after_the_blocks_that_are_whole(
    blocks: list[ArchivedBlock], data: st.DataObject
) -> None:
    whole = archive(blocks)
    cut = data.draw(st.integers(0, len(whole) - 1))
    found = []

    with pytest.raises(InvalidParameter, match=r"FILE: is (cut off|no file)"):
        for block in read_archive(io.BytesIO(whole[:cut]), "FILE"):
            found.append(block)

    assert found == blocks[: len(found)]


def test_a_damaged_header_is_found() -> None:
    whole = bytearray(archive([ArchivedBlock(b"k" * 32, b"f" * 32, b"c" * 16, b"data")]))
    whole[40] ^= 1

    with pytest.raises(InvalidParameter, match="is damaged after 0 blocks"):
        list(read_archive(io.BytesIO(whole), "FILE"))


def test_a_newer_format_is_refused() -> None:
    whole = bytearray(archive([]))
    whole[8] = 9

    with pytest.raises(InvalidParameter, match=r"newer version .format 9, this one knows 1"):
        list(read_archive(io.BytesIO(whole), "FILE"))


def test_a_missing_block_is_counted() -> None:
    blocks = [ArchivedBlock(bytes([i]) * 32, b"f" * 32, b"c" * 16, b"data") for i in range(2)]
    whole = archive(blocks)
    size = (len(whole) - 16 - 112) // 2

    with pytest.raises(InvalidParameter, match="has 1 blocks and should have 2"):
        list(read_archive(io.BytesIO(whole[:16] + whole[16 + size :]), "FILE"))
