"""Rules about pages that a program can check: lines end in time, and what a page names or links to is there.

Whether prose reads well is judged by people.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_imports import MODULES, ROOT, nodes

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MOST_COLUMNS = 120

FENCE = re.compile(r"^\s*(```|~~~)")
# Such as the campaign in docs/faults.md, which a program writes.
GENERATED = re.compile(r"^<!-- (\w+) -->$.*?^<!-- end of \1 -->$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`((?:embedding|workers|orchestrator|serving|tools|jobs|tests|benchmarks)/[\w/.-]+)`")


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of `text` that are neither code nor table nor heading nor generated; a blank line where those
    were.
    """
    text = GENERATED.sub(lambda found: "\n" * found[0].count("\n"), text)
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if mark and fence in ("", mark[1]):
            fence = "" if fence else mark[1]
            yield number, ""
        elif fence or line.lstrip().startswith(("|", "#", "<!--", "<a ")):
            yield number, ""
        else:
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_prose_end_in_time(page: Path) -> None:
    lines = prose_lines(page.read_text(encoding="utf-8"))
    assert [number for number, line in lines if len(line) > MOST_COLUMNS] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = FILE.findall(page.read_text(encoding="utf-8"))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def anchors(text: str) -> set[str]:
    """What a link can point at in a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^()\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        other = page.parent / name if name else page
        is_page = "://" not in link and other.suffix == ".md"
        if is_page and not (other.exists() and (not anchor or anchor in anchors(other.read_text(encoding="utf-8")))):
            broken.append(link)
    assert broken == []


def test_messages_that_a_page_explains_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = page.partition("## Messages\n")[2].partition("\n## ")[0].splitlines()
    told = [piece for row in rows if row.startswith("| `") for piece in re.findall("`(.*?)`", row.split("|")[1])]
    said = [str(node.value) for path in MODULES for node in nodes(path) if isinstance(node, ast.Constant)]
    assert [piece for piece in told if not any(piece in text for text in said)] == []
    assert told
