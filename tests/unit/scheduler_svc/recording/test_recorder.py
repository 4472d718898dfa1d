"""Recordings on disk: whole, cut off, damaged, too large, and written too slowly."""

import threading
from pathlib import Path

import pytest

from common.degraded import DegradedPaths
from common.errors import StartupError
from octavo.recording.v1 import recording_pb2 as pb
from scheduler_svc.recording.frames import MAGIC, append_frame
from scheduler_svc.recording.reader import RecordingFile
from scheduler_svc.recording.recorder import FIELDS, FORMAT_VERSION, Recorder, RecorderLimits


def drain_calls(folder: Path) -> list[pb.Call]:
    return list(RecordingFile.of(next(folder.glob("*.0000.octrec"))).calls())


def write(folder: Path, num_calls: int) -> None:
    recorder = Recorder(folder, DegradedPaths())
    recording = recorder.recording("10.0.0.1:50061")
    for number in range(num_calls):
        recording.note(recording.encode.due, float(number), None)
    recorder.close()


def test_what_was_noted_is_read_in_its_order_and_ends_in_good_order(tmp_path: Path) -> None:
    write(tmp_path / "made", 1000)

    calls = drain_calls(tmp_path / "made")
    assert [call.due.now_s for call in calls[:-1]] == list(range(1000))
    assert calls[-1].over == pb.Over()


def test_a_file_that_was_cut_off_is_read_to_the_cut(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, DegradedPaths(), RecorderLimits(frame_bytes=1 << 10))
    recording = recorder.recording("local")
    for number in range(1000):
        recording.note(recording.encode.due, float(number), None)
    recorder.close()
    path = next(tmp_path.glob("*.octrec"))
    path.write_bytes(path.read_bytes()[:-30])

    calls = drain_calls(tmp_path)
    assert 0 < len(calls) < 1000
    assert [call.due.now_s for call in calls] == list(range(len(calls)))


def test_a_damaged_file_is_refused_with_the_place(tmp_path: Path) -> None:
    write(tmp_path, 100)
    path = next(tmp_path.glob("*.octrec"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)

    with pytest.raises(StartupError, match="damaged at byte"):
        drain_calls(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "other.0000.octrec"])
def test_what_is_no_recording_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("hello, this is not a recording")

    with pytest.raises(StartupError):
        list(RecordingFile.of(tmp_path / name).calls())


def write_segments(folder: Path) -> list[Path]:
    """A recording of at least four files."""
    recorder = Recorder(folder, DegradedPaths(), RecorderLimits(segment_bytes=1, frame_bytes=1 << 8))
    recording = recorder.recording("local")
    for number in range(200):
        recording.note(recording.encode.due, float(number), None)
    recorder.close()
    return sorted(folder.glob("*.octrec"))


def test_any_file_of_a_recording_stands_for_all(tmp_path: Path) -> None:
    files = write_segments(tmp_path)

    assert len(files) >= 4
    assert [call.due.now_s for call in RecordingFile.of(files[2]).calls()][:-1] == list(range(200))


@pytest.mark.parametrize("gone", [0, 1])
def test_a_recording_with_a_file_missing_is_refused_with_its_name(tmp_path: Path, gone: int) -> None:
    files = write_segments(tmp_path)
    files[gone].unlink()

    for given in (files[2], files[3]):
        with pytest.raises(StartupError, match=rf"{files[gone].name} is missing: .* from its first file on"):
            RecordingFile.of(given)


def test_files_of_other_places_are_refused(tmp_path: Path) -> None:
    files = write_segments(tmp_path)
    files[1].write_bytes(files[2].read_bytes())

    with pytest.raises(StartupError, match="it was file 2 of its recording, not 1"):
        list(RecordingFile.of(files[0]).calls())


@pytest.mark.parametrize(("version", "age"), [(FORMAT_VERSION + 1, "newer"), (FORMAT_VERSION - 1, "older")])
def test_a_file_of_another_format_says_who_wrote_it(tmp_path: Path, version: int, age: str) -> None:
    path = tmp_path / "a.0000.octrec"
    with path.open("wb") as file:
        file.write(MAGIC)
        append_frame(file, pb.Header(version=version, software="octavo 7.0").SerializeToString())

    with pytest.raises(StartupError, match=rf"by octavo 7\.0 in format {version}, which is {age} than"):
        RecordingFile.of(path)


def test_a_file_of_another_layout_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.0000.octrec").write_bytes(MAGIC[:-1] + b"\x09")

    with pytest.raises(StartupError, match="layout 9, this software reads 1"):
        RecordingFile.of(tmp_path / "a.0000.octrec")


def test_a_file_with_fields_of_its_own_is_read_and_says_so(tmp_path: Path) -> None:
    write(tmp_path / "same", 1)
    other = tmp_path / "a.0000.octrec"
    with other.open("wb") as file:
        file.write(MAGIC)
        append_frame(file, pb.Header(version=FORMAT_VERSION, fields=FIELDS ^ 1).SerializeToString())

    assert not RecordingFile.of(next((tmp_path / "same").glob("*.octrec"))).has_other_fields
    assert RecordingFile.of(other).has_other_fields


def test_a_thread_that_falls_behind_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    degraded = DegradedPaths()
    recorder = Recorder(tmp_path, degraded, RecorderLimits(max_queued=10))
    recording = recorder.recording("local")
    may_go_on = threading.Event()

    def slow() -> pb.Call:
        may_go_on.wait(10)
        return pb.Call(restart=pb.Restart())

    for _ in range(30):
        recording.note(slow)
    may_go_on.set()
    recorder.close()

    calls = drain_calls(tmp_path)
    assert 10 <= len(calls) - 1 <= 12
    assert calls[-1].over.reason == "10 calls waited to be written"
    assert degraded.counts == {"recording_ended": 1}


def test_a_defect_of_the_encoder_ends_the_recording_and_is_said(tmp_path: Path) -> None:
    degraded = DegradedPaths()
    recorder = Recorder(tmp_path, degraded)
    recording = recorder.recording("local")
    recording.note(recording.encode.restart)
    recording.note(recording.encode.due, "not a time", None)
    recorder.close()

    assert drain_calls(tmp_path)[-1].over.reason.startswith("a defect")
    assert degraded.counts["recording_ended"] == 1


def test_a_folder_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StartupError, match="cannot write"):
        Recorder(tmp_path / "file" / "folder", DegradedPaths())
