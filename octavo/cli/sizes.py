"""Bytes for people: "2 GiB" in both directions."""

import re

from common.errors import InvalidParameter

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_bytes(text: str, option: str) -> int:
    """Reads "1048576", "512M", "2GiB" (powers of 1,024).

    Raises:
        InvalidParameter: text is no size; the message names the option.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidParameter(option, f"{text!r} is no size; write for example 512M or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(num_bytes: float) -> str:
    """For example "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
