"""Writes the tables of docs/operations.md that the code already knows: settings of each service, and errors.

    python -m scripts.reference_tables            writes them
    python -m scripts.reference_tables --check    fails when they are stale; part of make check

A table stands between "<!-- table: NAME -->" and "<!-- end of table -->".
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from common import errors
from common.settings import ServiceSettings
from executor_svc.settings import ExecutorSettings
from kvstore_svc.settings import KvStoreSettings
from scheduler_svc.settings import SchedulerSettings

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "operations.md"
_TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def settings_table(settings_class: type[ServiceSettings]) -> str:
    """Settings of one service: flag, default, meaning. The variable is the prefix and the flag in upper case."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for name, info in settings_class.model_fields.items():
        default = _default_text(info.get_default(call_default_factory=True))
        choices = f" ({' | '.join(map(str, get_args(info.annotation)))})" if _is_literal(info.annotation) else ""
        meaning = f"{info.description or ''}{choices}".replace("|", r"\|")
        rows.append(f"| `--{name.replace('_', '-')}` | {default} | {meaning} |")
    return "\n".join(rows)


def errors_table() -> str:
    """Every error: reason, status code, meaning."""
    rows = ["| reason | gRPC code | when |", "|---|---|---|"]
    for error_class in _subclasses(errors.OctavoError):
        if not issubclass(error_class, errors.StartupError):
            meaning = (error_class.__doc__ or "").splitlines()[0]
            rows.append(f"| `{error_class.reason}` | {error_class.code.name} | {meaning} |")
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {
    "scheduler-settings": lambda: settings_table(SchedulerSettings),
    "executor-settings": lambda: settings_table(ExecutorSettings),
    "kvstore-settings": lambda: settings_table(KvStoreSettings),
    "errors": errors_table,
}


def with_fresh_tables(page: str) -> str:
    """The page with every table written anew.

    Raises:
        KeyError: the page names a table that is not in TABLES.
    """
    return _TABLE.sub(lambda match: f"{match[1]}{TABLES[match['name']]()}\n{match[3]}", page)


def _subclasses(error_class: type[errors.OctavoError]) -> Iterator[type[errors.OctavoError]]:
    for subclass in error_class.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _is_literal(annotation: Any) -> bool:
    return str(get_origin(annotation)) == "typing.Literal"


def _default_text(value: Any) -> str:
    if value is None or value == "" or value == [] or str(value) == "**********":
        return ""
    if isinstance(value, Path):
        return f"`{str(value).replace(str(Path.home()), '~')}`"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20} Mi"
    return f"`{value}`" if isinstance(value, str) else str(value)


def main(argv: list[str]) -> int:
    """Writes or checks the page; the exit status."""
    page = PAGE.read_text()
    fresh = with_fresh_tables(page)
    if argv == ["--check"]:
        if fresh != page:
            print(f"{PAGE.relative_to(ROOT)}: tables are stale: run make tables")
        return 0 if fresh == page else 1
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
