"""Reads a recording, file after file, as calls. Knows the format; runs nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from common.errors import StartupError
from octavo.recording.v1 import recording_pb2 as pb
from scheduler_svc.recording.frames import read_frames, segments_of
from scheduler_svc.recording.recorder import FORMAT_VERSION


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
        return cls(segments, sum(segment.stat().st_size for segment in segments), 0, _header(next(read_frames(segments[0]), b"")))

    def calls(self) -> Iterator[pb.Call]:
        """All calls in order.

        Raises:
            StartupError: a file is damaged.
        """
        for segment in self.segments:
            frames = read_frames(segment)
            _header(next(frames, b""))
            for payload in frames:
                try:
                    calls = pb.Calls.FromString(payload).calls
                except DecodeError as error:
                    raise StartupError(f"{segment}: not what was written: {error}") from error
                yield from calls
            self.num_read_bytes += segment.stat().st_size


def _header(payload: bytes) -> pb.Header:
    try:
        header = pb.Header.FromString(payload)
    except DecodeError as error:
        raise StartupError(f"no recording: {error}") from error
    if header.version != FORMAT_VERSION:
        raise StartupError(f"a recording of format {header.version}, this software reads {FORMAT_VERSION}")
    return header
