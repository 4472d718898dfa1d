"""Reads a recording, file after file, as calls. Knows the format; runs nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from common.errors import StartupError
from octavo.recording.v1 import recording_pb2 as pb
from scheduler_svc.recording.frames import read_frames, segments_of
from scheduler_svc.recording.recorder import FIELDS, FORMAT_VERSION, SOFTWARE


@dataclass
class RecordingFile:
    """A recording on disk.

    Attributes:
        segments: its files in order.
        num_bytes: of all.
        num_read_bytes: of those that calls has given so far, about.
        header: of the first file.
    """

    segments: list[Path]
    num_bytes: int
    num_read_bytes: int
    header: pb.Header

    @classmethod
    def of(cls, path: Path) -> "RecordingFile":
        """The recording that a file belongs to.

        Raises:
            StartupError: it is none, or of another format.
        """
        segments = segments_of(path)
        header = _header(segments[0], 0, next(read_frames(segments[0]), b""))
        return cls(segments, sum(segment.stat().st_size for segment in segments), 0, header)

    @property
    def has_other_fields(self) -> bool:
        """Whether software wrote it that knows other fields than this one: what one side does not know counts as not set."""
        return self.header.fields != FIELDS

    def calls(self) -> Iterator[pb.Call]:
        """All calls in order.

        Raises:
            StartupError: a file is damaged.
        """
        for number, segment in enumerate(self.segments):
            frames = read_frames(segment)
            _header(segment, number, next(frames, b""))
            for payload in frames:
                try:
                    calls = pb.Calls.FromString(payload).calls
                except DecodeError as error:
                    raise StartupError(f"{segment}: not what was written: {error}") from error
                yield from calls
            self.num_read_bytes += segment.stat().st_size


def _header(segment: Path, number: int, payload: bytes) -> pb.Header:
    try:
        header = pb.Header.FromString(payload)
    except DecodeError as error:
        raise StartupError(f"{segment}: no recording: {error}") from error
    if header.version != FORMAT_VERSION:
        age = "newer" if header.version > FORMAT_VERSION else "older"
        raise StartupError(
            f"{segment}: written by {header.software or 'unknown software'} in format {header.version}, which is {age} than the "
            f"{FORMAT_VERSION} that this {SOFTWARE} reads: use the version that wrote it"
        )
    if header.segment != number:
        raise StartupError(f"{segment}: it was file {header.segment} of its recording, not {number}: files were renamed or mixed")
    return header
