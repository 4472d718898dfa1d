"""Reads a Dockerfile: stages, and what the image of a stage comes to. Knows the syntax that ours uses, no service of ours."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_CONTINUED = re.compile(r"\\\s*\n")
_COMMENT = re.compile(r"^\s*#.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a stage: keyword in upper case, and the rest of its logical line."""

    keyword: str
    rest: str


@dataclass
class Stage:
    """One FROM and what follows it."""

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class Image:
    """What a stage comes to, the stages below it included.

    Attributes:
        env: environment variables.
        user: value of the last USER; empty: root.
        entrypoint, command: in exec form; None: not set, or in shell form.
        healthcheck: command of the last HEALTHCHECK in exec form; None as above.
        ports: exposed ones.
        runs: shell commands, those of stages that files are copied from included.
        sources: paths that are copied from the build context, again of all these stages.
    """

    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    entrypoint: list[str] | None = None
    command: list[str] | None = None
    healthcheck: list[str] | None = None
    ports: set[int] = field(default_factory=set)
    runs: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


class Dockerfile:
    """A parsed Dockerfile.

    Attributes:
        stages: by name, in order.
    """

    def __init__(self, text: str):
        self.stages: dict[str, Stage] = {}
        stage: Stage | None = None
        for line in _CONTINUED.sub(" ", _COMMENT.sub("", text)).splitlines():
            keyword, _, rest = line.strip().partition(" ")
            if keyword.upper() == "FROM":
                base, _, name = rest.partition(" AS ")
                stage = Stage(name.strip(), base.strip())
                self.stages[stage.name] = stage
            elif keyword and stage is not None:
                stage.instructions.append(Instruction(keyword.upper(), rest.strip()))

    @classmethod
    def read(cls, path: Path) -> "Dockerfile":
        """Parses a file."""
        return cls(path.read_text())

    def image(self, name: str) -> Image:
        """What the stage comes to.

        Raises:
            KeyError: no such stage.
        """
        stage = self.stages[name]
        image = self.image(stage.base) if stage.base in self.stages else Image()
        for instruction in stage.instructions:
            self._apply(instruction, image)
        return image

    def _apply(self, instruction: Instruction, image: Image) -> None:
        rest = instruction.rest
        match instruction.keyword:
            case "ENV":
                image.env |= dict(word.split("=", 1) for word in shlex.split(rest))
            case "USER":
                image.user = rest
            case "ENTRYPOINT":
                image.entrypoint, image.command = _exec_form(rest), None
            case "CMD":
                image.command = _exec_form(rest)
            case "HEALTHCHECK":
                image.healthcheck = _exec_form(rest.partition("CMD ")[2])
            case "EXPOSE":
                image.ports |= {int(port.partition("/")[0]) for port in rest.split()}
            case "RUN":
                image.runs.append(rest)
            case "COPY":
                self._copy(rest, image)

    def _copy(self, rest: str, image: Image) -> None:
        words = rest.split()
        origin = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), None)
        if origin is None:
            image.sources += [word for word in words[:-1] if not word.startswith("--")]
        elif origin in self.stages:
            below = self.image(origin)
            image.runs += below.runs
            image.sources += below.sources


def _exec_form(rest: str) -> list[str] | None:
    try:
        words = json.loads(rest)
    except ValueError:
        return None
    return [str(word) for word in words] if isinstance(words, list) else None
