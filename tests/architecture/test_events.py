"""No code reads the sentence of an event: what acts on one looks at its kind and fields."""

from __future__ import annotations

import ast
from pathlib import Path

from podembed.orchestrator.events import commits, health, machines, progress, run, tracing  # noqa: F401
from podembed.orchestrator.events.event import Event
from tests.architecture.test_imports import ROOT, label, parsed

READERS = ("orchestrator", "tools", "jobs", "tests/faults", "tests/simulation")
BEGINNINGS = {kind.template.partition("{")[0] for kind in Event.__subclasses__() if hasattr(kind, "template")}
WORDS = ("fault:", *sorted(words.rstrip(": ") for words in BEGINNINGS if words.count(" ") > 1))


def sought(path: Path) -> list[str]:
    """Words of sentences that a file compares texts with, or looks for in them."""
    found = []
    for node in ast.walk(parsed(path)):
        arguments: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            searches = ("startswith", "endswith", "removeprefix", "find", "match", "search", "compile", "fullmatch")
            arguments = node.args if node.func.attr in searches else []
        elif isinstance(node, ast.Compare):
            arguments = [node.left, *node.comparators]
        texts = [part.value for part in arguments if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        found += [text for text in texts if text.strip() and text.startswith(WORDS)]
    return found


def test_no_code_reads_sentences() -> None:
    files = [path for folder in READERS for path in (ROOT / folder).rglob("*.py")]
    readers = {label(path): words for path in files if (words := sought(path))}
    assert readers == {}


def test_a_reader_would_be_found(tmp_path: Path) -> None:
    reader = tmp_path / "reader.py"
    reader.write_text('if text.startswith("fault: ") or "waiting for hosts" in text: pass\n', encoding="utf-8")
    assert sought(reader) == ["fault: ", "waiting for hosts"]
