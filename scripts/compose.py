"""Reads docker-compose.yml with the defaults of its .env. Knows compose's syntax as far as ours uses it, no service of ours."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Service:
    """One service.

    Attributes:
        raw: its mapping, variables replaced.
        mounts: volume by path in the container.
    """

    name: str
    raw: dict[str, Any]
    mounts: dict[str, str]

    @property
    def target(self) -> str | None:
        """The stage of the Dockerfile that it is built from; None: a ready-made image."""
        build = self.raw.get("build")
        return build.get("target") if isinstance(build, dict) else None

    @property
    def env(self) -> dict[str, str]:
        """Its own environment."""
        return {name: str(value) for name, value in self.raw.get("environment", {}).items()}

    @property
    def dependencies(self) -> dict[str, str]:
        """Condition by the service that it waits for."""
        return {name: entry["condition"] for name, entry in self.raw.get("depends_on", {}).items()}

    @property
    def profiles(self) -> list[str]:
        """Profiles that it belongs to; none: it always runs."""
        return list(self.raw.get("profiles", []))

    def mounted(self, path: str) -> str | None:
        """The volume that holds a path of the container."""
        folders = [folder for folder in self.mounts if path == folder or path.startswith(folder + "/")]
        return self.mounts[max(folders, key=len)] if folders else None


class Compose:
    """A parsed compose file.

    Attributes:
        project: its name, which begins the names of its containers.
        services: by name.
        volumes: by name.
    """

    def __init__(self, text: str, variables: dict[str, str]):
        data = _replaced(yaml.safe_load(text), variables)
        self.project: str = data["name"]
        self.services = {name: Service(name, raw, _mounts(raw)) for name, raw in data["services"].items()}
        self.volumes: dict[str, dict[str, Any]] = data.get("volumes", {})
        self.networks: dict[str, dict[str, Any]] = data.get("networks", {})

    @classmethod
    def read(cls, folder: Path) -> "Compose":
        """Parses docker-compose.yml and .env of a folder."""
        lines = (folder / ".env").read_text().splitlines()
        variables = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
        return cls((folder / "docker-compose.yml").read_text(), variables)


def num_bytes(size: str | int) -> int:
    """Bytes of a size such as "6g"."""
    text = str(size).lower().removesuffix("b")
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)


def _replaced(value: Any, variables: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(entry, variables) for key, entry in value.items()}
    if isinstance(value, list):
        return [_replaced(entry, variables) for entry in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: variables.get(match[1], match[2] or ""), value)
    return value


def _mounts(raw: dict[str, Any]) -> dict[str, str]:
    parts = [volume.split(":") for volume in raw.get("volumes", [])]
    return {part[1]: part[0] for part in parts}
