"""Files of recordings: frames that say when they are torn. Knows bytes and places of files; no call and no scheduler.

    8 bytes of magic | frames: u32 number of payload bytes | u32 CRC-32 of the payload | payload, compressed by zlib

little endian. The first payload is a Header, all others are Calls, see octavo/recording/v1/recording.proto. A recording is a
row of files NAME.0000.octrec, NAME.0001.octrec, ...; only all from the first one can be run again: a file begins in the middle
of its core's life, and what the core knew then, prompts among it, is nowhere written. A frame that was cut off by the end of
its writer ends the recording there.
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
        StartupError: it is no file of a recording, or not all from the first one on are there.
    """
    match = _SEGMENT.fullmatch(path.name)
    if match is None or not path.is_file():
        raise StartupError(f"{path}: no file of a recording; they are called NAME.0000.octrec")
    numbers = sorted(
        int(other[2]) for file in path.parent.iterdir() if (other := _SEGMENT.fullmatch(file.name)) and other[1] == match[1]
    )
    missing = next((number for number in range(numbers[-1] + 1) if number not in numbers), None)
    if missing is not None:
        name = segment_path(path.parent, match[1], missing).name
        raise StartupError(
            f"{path}: {name} is missing: a recording is run again from its first file on, with all that follow, because its "
            "files hold calls and not the state of the core"
        )
    return [segment_path(path.parent, match[1], number) for number in numbers]


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
        magic = file.read(len(MAGIC))
        if magic[:-1] != MAGIC[:-1]:
            raise StartupError(f"{path}: no recording")
        if magic != MAGIC:
            raise StartupError(
                f"{path}: a recording in layout {magic[-1]}, this software reads {MAGIC[-1]}: use the version that wrote it"
            )
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
