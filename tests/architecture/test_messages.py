"""What a user reads at a terminal is plain English: no sentence of an error, of a notice or of the help is long.

The texts are taken from the code: those of `raise` statements, of calls of `notice`, and below the flags of a command.
A text that is put together in several functions is seen in parts, each for itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from tests.architecture.test_imports import ROOT, nodes
from tests.architecture.test_prose import MOST_WORDS, num_words, replaced_words, sentences

PACKAGES = ("embedding", "workers", "orchestrator", "jobs")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
# Functions that get a message, or a part of one.
TELLING = {"refuse", "_refused", "_sentence", "add_note"}


def text_of(node: ast.expr) -> str | None:
    """The text of a literal, with `Value` where something is put in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "Value" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None or right is None else left + right
    return None


def messages(nodes: Iterable[ast.AST], *, has_events: bool = False) -> Iterator[tuple[int, str]]:
    """Line and text of everything that is raised or told.

    Args:
      has_events: what is told belongs to events, and is no text here.
    """
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
        elif isinstance(node, ast.Call) and name_of(node.func) in TELLING | (
            set() if has_events else {"notice", "_notice"}
        ):
            call = node
        else:
            continue
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
            text = text_of(argument)
            if text is not None:
                yield argument.lineno, text


def flag_texts(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Texts below the fields of a class, which `--help` shows."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    text = text_of(below.value)
                    if text is not None:
                        yield below.lineno, text


def name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


@cache
def texts_of(path: Path) -> list[tuple[int, str]]:
    # What the driver tells are events, which have sentences of their own.
    told = messages(nodes(path), has_events=path.is_relative_to(ROOT / "orchestrator"))
    return [(line, " ".join(text.split())) for line, text in [*told, *flag_texts(nodes(path))]]


@pytest.mark.parametrize("package", PACKAGES)
def test_sentences_of_messages_are_short(package: str) -> None:
    long = [
        f"{path.relative_to(ROOT)}, line {line}: {num_words(sentence)} words: {sentence}"
        for path in FILES
        if path.is_relative_to(ROOT / package)
        for line, text in texts_of(path)
        for sentence in sentences(text)
        if num_words(sentence) > MOST_WORDS
    ]
    assert long == []


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_use_the_words_of_the_field(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}, line {line}: {word}: {text}"
        for path in FILES
        if path.is_relative_to(ROOT / package)
        for line, text in texts_of(path)
        for word in replaced_words(text)
    ]
    assert found == []


def test_texts_are_seen() -> None:
    """The check would pass if it saw none."""
    code = 'raise ValueError(f"Found {x}. " "Expected y.")\nself.notice("a " + "b")\n'
    code += 'class A:\n    x: int\n    """Text."""\n'
    assert [text for _, text in messages(ast.walk(ast.parse(code)))] == ["Found Value. Expected y.", "a b"]
    assert [text for _, text in flag_texts(ast.walk(ast.parse(code)))] == ["Text."]
    many = 500
    found = (text for path in FILES for text in messages(nodes(path)))
    assert sum(1 for _ in islice(found, many + 1)) > many
