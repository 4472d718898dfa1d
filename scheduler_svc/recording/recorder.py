"""Writes recordings beside the scheduler: its loop only hands references over, a thread makes records of them and writes.

Nothing waits for the thread. When it falls behind by too much, or the disk fails, or the recording has all the bytes that it may
take, the recording ends there: what came before can still be run. That is noted as a degraded path.
"""

import logging
import os
import queue
import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.degraded import DegradedPaths
from common.errors import StartupError
from octavo import __version__
from octavo.recording.v1 import recording_pb2 as pb
from scheduler_svc.recording.calls import CallEncoder
from scheduler_svc.recording.frames import MAGIC, append_frame, segment_path

log = logging.getLogger(__name__)
FORMAT_VERSION = 1
"""Raised when what a recording says means something else than before; fields that are added change FIELDS."""
FIELDS = zlib.crc32(pb.DESCRIPTOR.serialized_pb)
SOFTWARE = f"octavo {__version__}"
_MAX_QUEUED = 50_000
"""Calls; some seconds of a busy scheduler."""
_FRAME_S = 0.5


@dataclass(frozen=True, slots=True)
class RecorderLimits:
    """How much is kept.

    Attributes:
        segment_bytes: of one file; then the next one begins.
        max_bytes: of all files of the process.
        max_queued: calls that may wait for the thread.
        frame_bytes: before compression; written at the latest after half a second.
    """

    segment_bytes: int = 64 << 20
    max_bytes: int = 4 << 30
    max_queued: int = _MAX_QUEUED
    frame_bytes: int = 1 << 18


class Recording:
    """Of one executor. What it is told is written as long as nothing went wrong.

    Attributes:
        encode: makes records of calls, in the recorder's thread.
    """

    def __init__(self, recorder: "Recorder", executor: str, name: str):
        self.encode = CallEncoder(recorder.secret)
        self.executor = executor
        self.name = name
        self._recorder = recorder

    def note(self, encode: Callable[..., pb.Call], *args: object) -> None:
        """A call was made; its arguments do not change any more. Costs the caller half a microsecond."""
        self._recorder.put(self, encode, args)


class Recorder:
    """See the module's first lines.

    Attributes:
        secret: of the substitutes for tokens; known to this process alone.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path, degraded: DegradedPaths, limits: RecorderLimits | None = None):
        """Starts the thread.

        Raises:
            StartupError: nothing can be written to the folder.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StartupError(f"record: cannot write to {folder}: {error.strerror}") from error
        self.secret = secrets.token_bytes(32)
        self._folder = folder
        self._degraded = degraded
        self._limits = limits or RecorderLimits()
        self._stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._queue: queue.SimpleQueue[tuple[Recording, Callable[..., pb.Call], tuple[object, ...]] | None] = queue.SimpleQueue()
        self._files: dict[Recording, _Segments] = {}
        self._end_reason: str | None = None
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def recording(self, executor: str) -> Recording:
        """Begins the recording of an executor."""
        label = re.sub(r"[^A-Za-z0-9]+", "-", executor.rsplit("/", 1)[-1]).strip("-") or "executor"
        taken = sum(other.name.startswith(f"{label}-{self._stamp}") for other in self._files)
        recording = Recording(self, executor, f"{label}-{self._stamp}" + (f"-{taken}" if taken else ""))
        self._files[recording] = _Segments(self._folder, recording, self._limits)
        return recording

    def put(self, recording: Recording, encode: Callable[..., pb.Call], args: tuple[object, ...]) -> None:
        """Hands a call over to the thread."""
        if self._end_reason is not None:
            return
        if self._queue.qsize() >= self._limits.max_queued:
            self._end(f"{self._limits.max_queued} calls waited to be written")
            return
        self._queue.put((recording, encode, args))

    def close(self) -> None:
        """Writes what waits and ends the recordings."""
        self._queue.put(None)
        self._thread.join()

    def _end(self, reason: str) -> None:
        self._end_reason = reason
        self._degraded.note("recording_ended", reason)

    def _write_all(self) -> None:
        flush_at_s = time.monotonic() + _FRAME_S
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, flush_at_s - time.monotonic()))
            except queue.Empty:
                flush_at_s = time.monotonic() + _FRAME_S
                self._guarded(self._flush)
                continue
            if item is None:
                break
            recording, encode, args = item
            self._guarded(self._files[recording].append, encode, args)
            if time.monotonic() >= flush_at_s:
                flush_at_s = time.monotonic() + _FRAME_S
                self._guarded(self._flush)
            time.sleep(0)  # a loop that wants to go on does not wait for the rest of the queue
        for segments in self._files.values():
            self._guarded(segments.end, self._end_reason or "")

    def _guarded(self, action: Callable[..., None], *args: object) -> None:
        """Does it; what fails ends the recording and nothing else."""
        try:
            action(*args)
        except OSError as error:
            self._end(f"{self._folder}: {error.strerror}")
        except Exception as defect:
            log.exception("the recording failed")
            self._end(f"a defect: {defect!r}")

    def _flush(self) -> None:
        for segments in self._files.values():
            segments.flush()
        if self._end_reason is None and sum(s.num_bytes for s in self._files.values()) >= self._limits.max_bytes:
            self._end(f"it has the {self._limits.max_bytes} bytes that it may have")


class _Segments:
    """The files of one recording, in the thread."""

    def __init__(self, folder: Path, recording: Recording, limits: RecorderLimits):
        self.num_bytes = 0
        self._folder = folder
        self._recording = recording
        self._limits = limits
        self._file: BinaryIO | None = None
        self._num_segments = 0
        self._segment_end = 0
        self._calls: list[bytes] = []
        self._calls_bytes = 0

    def append(self, encode: Callable[..., pb.Call], args: tuple[object, ...]) -> None:
        data = pb.Calls(calls=[encode(*args)]).SerializeToString()  # a message is the concatenation of its parts
        self._calls.append(data)
        self._calls_bytes += len(data)
        if self._calls_bytes >= self._limits.frame_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes a frame of what there is; to the next file if this one is full."""
        if not self._calls:
            return
        payload = b"".join(self._calls)
        self._calls.clear()
        self._calls_bytes = 0
        if self._file is None or self.num_bytes >= self._segment_end:
            self._next_file()
        assert self._file is not None
        self.num_bytes += append_frame(self._file, payload)
        self._file.flush()

    def end(self, reason: str) -> None:
        """Writes the last record."""
        self.append(lambda: pb.Call(over=pb.Over(reason=reason)), ())
        try:
            self.flush()
        finally:
            if self._file is not None:
                self._file.close()

    def _next_file(self) -> None:
        if self._file is not None:
            self._file.close()
        path = segment_path(self._folder, self._recording.name, self._num_segments)
        header = pb.Header(
            version=FORMAT_VERSION,
            software=SOFTWARE,
            fields=FIELDS,
            executor=self._recording.executor,
            segment=self._num_segments,
        )
        self._file = path.open("xb")
        self._num_segments += 1
        self._segment_end = self.num_bytes + self._limits.segment_bytes
        self._file.write(MAGIC)
        self.num_bytes += len(MAGIC) + append_frame(self._file, header.SerializeToString())
