"""The safetensors files of a model folder: which there are and whether they are whole. Reads headers, no weights."""

import json
import struct
from pathlib import Path

from common.errors import StartupError


def weight_files(folder: Path) -> list[Path]:
    """The folder's *.safetensors files, by name."""
    return sorted(folder.glob("*.safetensors"))


def check_weight_files(folder: Path) -> None:
    """Refuses a folder without weights, with missing shards, or with a damaged file.

    Raises:
        StartupError: names the file and the problem.
    """
    files = weight_files(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            wanted = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise StartupError(f"{index} is damaged: {error!r}") from error
        missing = sorted(wanted - {file.name for file in files})
        if missing:
            raise StartupError(f"model folder {folder} lacks {len(missing)} of {len(wanted)} weight files, first {missing[0]}")
    if not files:
        raise StartupError(f"model folder {folder} has no weights (*.safetensors); use --load-format random to do without")
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """Compares the file's size with what its header says."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            if header_bytes > size:
                raise ValueError("header is longer than the file")
            header = json.loads(stream.read(header_bytes))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{file} is not a safetensors file: {error}") from error
    if 8 + header_bytes + end != size:
        raise StartupError(f"{file} is truncated: {size} bytes of {8 + header_bytes + end}")
