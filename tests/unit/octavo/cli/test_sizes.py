"""Bytes for people."""

import pytest

from octavo.cli.sizes import format_bytes, parse_bytes
from octavo.errors import InvalidParameter


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("512M", 512 << 20),
        ("2GiB", 2 << 30),
        ("1.5 g", 3 << 29),
        ("64kb", 64 << 10),
        ("1T", 1 << 40),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text, "--kv-memory") == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1", "1.2.3", "5 X", "G"])
def test_what_is_no_size_is_refused_by_the_options_name(text: str) -> None:
    with pytest.raises(InvalidParameter, match="--kv-memory"):
        parse_bytes(text, "--kv-memory")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (5 << 42, "20.0 TiB")],
)
def test_sizes_are_written(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
