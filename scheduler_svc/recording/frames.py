"""Files of recordings: frames that say when they are torn. Knows bytes and places of files; no call and no scheduler.

    8 bytes of magic | frames: u32 number of payload bytes | u32 CRC-32 of the payload | payload, compressed by zlib

little endian. The first payload is a Header, all others are Calls, see octavo/recording/v1/recording.proto. A recording is a
row of files NAME.0000.octrec, NAME.0001.octrec, ...; only all from the first one can be run again. A frame that was cut off
by the end of its writer ends the recording there.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from common.errors import StartupError

MAGIC = b"octrec\x00\x01"
_HEAD = struct.Struct("<II")
_LEVEL = 1
_SEGMENT = re.compile(r"(.+)\.(\d{4,})\.octrec")
_MAX_PAYLOAD = 1 << 28


def segment_path(folder: Path, name: str, number: int) -> Path:
    """The file of a recording's segment."""
    return folder / f"{name}.{number:04}.octrec"


def segments_of(path: Path) -> list[Path]:
    """All files of the recording that a file belongs to, from the first to the last.

    Raises:
        StartupError: it is no file of a recording, or one in front of the last is missing.
    """
    match = _SEGMENT.fullmatch(path.name)
    if match is None or not path.is_file():
        raise StartupError(f"{path}: no file of a recording; they are called NAME.0000.octrec")
    found: list[Path] = []
    while (segment := segment_path(path.parent, match[1], len(found))).exists():
        found.append(segment)
    if len(found) <= int(match[2]):
        raise StartupError(f"{path}: {segment_path(path.parent, match[1], len(found)).name} is missing")
    return found


def append_frame(file: BinaryIO, payload: bytes) -> int:
    """Writes a frame.

    Returns:
        Its bytes.
    """
    packed = zlib.compress(payload, _LEVEL)
    file.write(_HEAD.pack(len(packed), zlib.crc32(packed)) + packed)
    return _HEAD.size + len(packed)


def read_frames(path: Path) -> Iterator[bytes]:
    """The payloads of a file, up to its end or to a frame that was cut off.

    Raises:
        StartupError: it is no file of a recording, or a frame is not what was written.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise StartupError(f"{path}: no recording, or of another version of the format")
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, crc = _HEAD.unpack(head)
            at = file.tell()
            if length > _MAX_PAYLOAD:
                raise StartupError(f"{path}: damaged before byte {at}")
            packed = file.read(length)
            if len(packed) < length:
                return
            if zlib.crc32(packed) != crc:
                raise StartupError(f"{path}: damaged at byte {at}")
            yield zlib.decompress(packed)
