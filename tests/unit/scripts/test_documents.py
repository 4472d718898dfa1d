"""What the documentation points at is there."""

import re
from itertools import takewhile
from pathlib import Path

import pytest

from scripts.reference_tables import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")

# A word of the README's tree that is a path: a folder, a file with an extension, or one of the well-known files without.
_PATH = re.compile(r"[\w./-]+/|[\w/-]*\.[\w/]+|Makefile|Dockerfile|LICENSE")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in _LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {path}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {path}#{anchor}"


def test_the_tree_of_the_readme_is_there() -> None:
    tree = (ROOT / "README.md").read_text().partition("## What is where\n```\n")[2].partition("```")[0]
    folder = ROOT
    for line in tree.splitlines():
        is_top = not line.startswith(" ")
        paths = list(takewhile(_PATH.fullmatch, line.split()))
        assert paths, line
        for path in paths:
            assert ((ROOT if is_top else folder) / path).exists(), f"{line!r}: {path}"
        if is_top:
            folder = ROOT / paths[0]


def test_module_paths_in_the_documents_exist() -> None:
    for page in PAGES:
        for path in re.findall(r"`((?:common|octavo|\w+_svc|scripts|tests|bench)/[\w/.]+\.\w+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_tests_that_the_documents_name_are_there() -> None:
    for page in PAGES:
        path = ""
        for named, test in re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", page.read_text()):
            path = named or path  # "::test" alone is of the file before
            assert re.search(rf"def {test}\(", (ROOT / path).read_text()), f"{page.name}: {path}::{test}"
