"""Rules about prose that a program can check: short sentences, short lines, the field's words.

They hold for README and docs, where code, tables, headings and the addresses of links are left out. They hold for
docstrings and comments of `READ_FLOORS` and of the benchmarks, too. A page that names a file or a folder names one that
is there.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_imports import MODULES, ROOT, label, nodes

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Whose docstrings and comments are held to the rules. Benchmarks are no floor and are read beside them.
READ_FLOORS = ("embedding/", "workers/", "orchestrator/", "jobs/")
READ_FILES = [
    *(path for path in MODULES if label(path).startswith(READ_FLOORS)),
    *sorted((ROOT / "benchmarks").glob("*.py")),
]
MOST_WORDS = 25
MOST_COLUMNS = 120
# What the docs do not say any more, and the field's word for it.
REPLACED = {
    r"held rows?": "surviving shard",
    r"handover|handed over": "shared-memory channel, passed on",
    r"(?<!row )\bforming": "mesh setup",
    r"seats?": "hash slots",
    r"the way back|ways back": "undo",
    r"strangers?": "hosts on other machines",
    r"neighbours?": "hosts on the same machine",
    r"nobody": "no other host, no process",
    r"\b(?:is|are|was|were|be|been) told": "reported",
    r"asked for": "requested",
}

FENCE = re.compile(r"^\s*(```|~~~)")
# Such as the campaign in docs/faults.md, which a program writes.
GENERATED = re.compile(r"^<!-- (\w+) -->$.*?^<!-- end of \1 -->$", re.DOTALL | re.MULTILINE)
ITEM = re.compile(r"^\s*(?:[*+-]|\d+\.)\s+")
CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\((?:[^()\s]|\([^()]*\))*\)")
FILE = re.compile(r"`((?:embedding|workers|orchestrator|jobs|tests|benchmarks)/[\w/.-]+)`")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|al|cf|No|approx)\.")
# An end of a sentence: a full stop, then a capital, a figure or code, perhaps behind brackets, quotes or emphasis.
END = re.compile(r"""(?<=[.!?])[)"'*_”]*\s+(?=[("'*_“]*[A-Z0-9])""")


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


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """The number of its first line and the text of each paragraph and list item."""
    start, lines = 0, list[str]()
    for number, line in [*prose_lines(text), (0, "")]:
        if lines and (not line.strip() or ITEM.match(line)):
            yield start, " ".join(lines)
            lines = []
        if line.strip():
            start = start if lines else number
            lines.append(ITEM.sub("", line).strip())


def sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph, with `Code` for each piece of code and the text alone of each link."""
    plain = LINK.sub(r"\1", CODE_SPAN.sub("Code", paragraph))
    return END.split(ABBREVIATION.sub(r"\1", plain))


def num_words(sentence: str) -> int:
    """Pieces between blanks that hold a letter or a figure: a dash or an operator alone is no word."""
    return sum(any(map(str.isalnum, piece)) for piece in sentence.split())


def long_sentences(text: str) -> list[str]:
    return [
        f"line {line}: {num_words(sentence)} words: {sentence}"
        for line, paragraph in paragraphs(text)
        for sentence in sentences(paragraph)
        if num_words(sentence) > MOST_WORDS
    ]


def replaced_words(text: str) -> list[str]:
    """Also in tables, whose cells are prose; not in code."""
    plain = CODE_SPAN.sub("Code", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    plain = re.sub(r"\]\([^)]*\)", "]", plain)
    return [
        f"{match[0]!r}: write {better!r}"
        for old, better in REPLACED.items()
        for match in re.finditer(rf"\b(?:{old})\b", plain, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_of_a_page_are_short(page: Path) -> None:
    assert long_sentences(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_prose_end_in_time(page: Path) -> None:
    lines = prose_lines(page.read_text(encoding="utf-8"))
    assert [number for number, line in lines if len(line) > MOST_COLUMNS] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    assert replaced_words(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = FILE.findall(page.read_text(encoding="utf-8"))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


# What begins a paragraph of its own in a docstring: an item of a list, or the name of an argument or of an error.
ENTRY = re.compile(r"(?:[*+-]|\d+\.)\s+|(?:[\w*][\w, .*]*): ")


def docstring_paragraphs(docstring: str) -> Iterator[str]:
    """Paragraphs and entries of a docstring, without names of sections and entries, code and tables."""
    lines: list[str] = []
    for line in [*docstring.split("\n"), ""]:
        text = line.strip()
        entry = ENTRY.match(text) if line.startswith("  ") else ITEM.match(text)
        if lines and (not text or entry):
            yield " ".join(lines)
            lines = []
        if text and not text.startswith(("|", ">>>", "```", "python ")):
            lines.append(text[entry.end() :] if entry else text)


def comment_blocks(source: str) -> Iterator[str]:
    """Comments of neighbouring lines as one text; one behind code stands alone."""
    block, last = list[str](), 0
    # Most of the time goes here, and many files have no comment.
    for token in tokenize.generate_tokens(io.StringIO(source).readline) if "#" in source else ():
        if token.type == tokenize.COMMENT:
            is_alone = token.line.lstrip().startswith("#")
            if block and not (is_alone and token.start[0] == last + 1):
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            # What stands below a comment behind code does not continue it.
            last = token.start[0] if is_alone else 0
    if block:
        yield " ".join(block)


def prose_of(path: Path) -> Iterator[str]:
    """All paragraphs of docstrings and comments of a source file."""
    for node in nodes(path):
        for statement in getattr(node, "body", None) or () if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from docstring_paragraphs(value.value)
    yield from comment_blocks(path.read_text(encoding="utf-8"))


def test_docstrings_and_comments_follow_the_rules() -> None:
    found = [
        f"{label(path)}: {problem}"
        for path in READ_FILES
        for paragraph in prose_of(path)
        for problem in [
            *(f"{num_words(one)} words: {one}" for one in sentences(paragraph) if num_words(one) > MOST_WORDS),
            *replaced_words(paragraph),
        ]
    ]
    assert found == []


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


def test_the_check_finds_what_it_is_for() -> None:
    long = "word " * 26
    assert len(long_sentences(f"Short one. {long}end.\n\n* {long}")) == 2
    assert long_sentences("One `a. B c` of 0.5 s, e.g. Ray. " + "word " * 15 + "\n| " + long + "|\n\n# " + long) == []
    assert long_sentences(f"```\n{long}\n```\n{'[a b](http://x.y/(z)) ' * 12}") == []
    assert replaced_words("Nobody [is](told.md) `nobody`.\n```\nnobody\n```\n") == [
        "'Nobody': write 'no other host, no process'"
    ]


def test_the_check_reads_docstrings_and_comments() -> None:
    long = "word " * 26
    listed = "Two:\n\n* one\n  more\n* two\n\n    python one.py --two\n"
    assert [*docstring_paragraphs(listed)] == ["Two:", "one more", "two"]
    docstring = f"Short.\n\n    Args:\n      one: {long}\n        more.\n      two: short\n"
    assert max(num_words(one) for text in docstring_paragraphs(docstring) for one in sentences(text)) == 27
    source = "# one\n# two\nx = 1  # three\ny = 2  # four\n# five\n"
    assert [*comment_blocks(source)] == ["one two", "three", "four", "five"]
