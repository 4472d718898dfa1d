"""Which tile sizes a kernel runs with: built-in defaults per GPU architecture, and a cache file of tuned ones.

Knows device names, library versions and JSON. Does not know what a kernel computes. A missing, broken or foreign cache file
is an empty one: it costs speed, never a start. One file serves several devices and versions: each entry is keyed by all
that its measurement depended on.

```
lookup("paged_decode", shape) ── tuned before, for this device, versions and shape? ── yes: that
                                     └─ no: defaults of the nearest architecture at or below the device's
```
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import triton

Config = dict[str, int]
Shape = Mapping[str, int | str | bool]

FORMAT_VERSION = 1
TUNED_FILE = "kernels.json"
"""Name of the cache file, in the folder of prepared models."""
log = logging.getLogger(__name__)


class ConfigCache:
    """Tuned configurations of one device, and the file that keeps them.

    Attributes:
        device_key: device name and library versions that entries hold for.
        capability: major * 10 + minor of the device's architecture.
    """

    def __init__(self, path: Path | None, device_key: str, capability: int):
        """Reads the file.

        Args:
            path: of the file, which need not exist; None: nothing is kept.
            device_key: see Attributes.
            capability: see Attributes.
        """
        self.device_key = device_key
        self.capability = capability
        self._path = path
        self._entries = {} if path is None else _read(path)

    def find(self, kernel: str, shape: Shape) -> Config | None:
        """The tuned configuration, if there is one."""
        return self._entries.get(self._key(kernel, shape))

    def put(self, kernel: str, shape: Shape, config: Config) -> None:
        """Keeps a configuration, in the file too. That the file cannot be written is logged, not raised."""
        self._entries[self._key(kernel, shape)] = dict(config)
        if self._path is None:
            return
        # What another process has tuned since is kept: its entries are read again right before the file is replaced.
        document = {"version": FORMAT_VERSION, "entries": {**_read(self._path), **self._entries}}
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(document, indent=1, sort_keys=True))
            part.replace(self._path)
        except OSError as error:
            log.warning("tuned kernel configurations cannot be kept in %s: %s", self._path, error)

    def _key(self, kernel: str, shape: Shape) -> str:
        said = ",".join(f"{name}={shape[name]}" for name in sorted(shape))
        return f"{self.device_key}|{kernel}|{said}"


_defaults: dict[str, dict[int, Config]] = {}
_active: ConfigCache | None = None
_looked_up: dict[tuple[str, tuple[tuple[str, int | str | bool], ...]], Config] = {}


def register_defaults(kernel: str, by_capability: Mapping[int, Config]) -> None:
    """Says what a kernel runs with where nothing was tuned; module level of the kernel's file.

    Args:
        kernel: its name in lookup and tune.
        by_capability: by lowest architecture that it is meant for (80, 86, 89, 90, 100, 120); at least one entry.
    """
    _defaults[kernel] = {capability: dict(by_capability[capability]) for capability in sorted(by_capability)}


def open_cache(path: Path | None) -> None:
    """Uses the file at path from now on; None: built-in defaults only. Called once, before the first lookup."""
    global _active
    _active = ConfigCache(path, _device_key(), _capability())
    _looked_up.clear()


def lookup(kernel: str, shape: Shape) -> Config:
    """The configuration for a kernel on this process's device.

    Args:
        kernel: a name that register_defaults knows.
        shape: what the configuration depends on, for example {"head_dim": 128, "dtype": "bfloat16"}.
    """
    key = (kernel, tuple(shape.items()))
    found = _looked_up.get(key)
    if found is None:
        cache = _cache()
        default = default_config(kernel, cache.capability)
        # A file from an older version may lack a setting that the kernel has since.
        found = _looked_up[key] = {**default, **(cache.find(kernel, shape) or {})}
    return found


def default_config(kernel: str, capability: int) -> Config:
    """The built-in configuration for an architecture: the one of the nearest at or below it, or else the lowest."""
    table = _defaults[kernel]
    return dict(table[max((known for known in table if known <= capability), default=min(table))])


def tune(kernel: str, shape: Shape, candidates: Iterable[Config], run: Callable[[Config], float]) -> Config:
    """Measures candidates, keeps the fastest and returns it; what is in the cache already is not measured again.

    Args:
        kernel: as in lookup.
        shape: as in lookup.
        candidates: each a complete configuration.
        run: seconds, or any cost, that the kernel takes with a configuration. It may raise RuntimeError or ValueError, or
            triton's errors for a configuration that the device cannot hold, which skips the candidate.
    """
    cache = _cache()
    known = cache.find(kernel, shape)
    if known is not None:
        return known
    best, best_cost = lookup(kernel, shape), float("inf")
    for config in candidates:
        try:
            cost = run(config)
        except (RuntimeError, ValueError, triton.TritonError) as error:
            log.debug("%s with %s does not run: %s", kernel, config, error)
            continue
        if cost < best_cost:
            best, best_cost = config, cost
    if best_cost < float("inf"):
        cache.put(kernel, shape, best)
        _looked_up.clear()
    return best


def _cache() -> ConfigCache:
    if _active is None:
        open_cache(None)
    assert _active is not None
    return _active


def _device_key() -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"{name}|torch {torch.__version__}|triton {triton.__version__}"


def _capability() -> int:
    if not torch.cuda.is_available():
        return 80
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def _read(path: Path) -> dict[str, Config]:
    """Entries of a cache file; none if it is missing or not one."""
    try:
        document = json.loads(path.read_text())
        if document["version"] != FORMAT_VERSION:
            raise ValueError(f"version {document['version']}, not {FORMAT_VERSION}")
        return {
            str(key): {str(name): int(value) for name, value in config.items()} for key, config in document["entries"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("tuned kernel configurations in %s are not used: %s", path, error)
        return {}
