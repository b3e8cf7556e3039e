"""Public names: docs/names.md, `__all__` and what can be imported are the same, and users are told no other names."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import podembed
from tests.architecture.test_imports import FLOORS, MODULES, ROOT, label, parsed

PAGE = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
PLACES = ("podembed", "podembed.embedding", "podembed.jobs.models", "podembed.jobs.datasets")
# Declarations of tables are said to the trainer, and they are a part of the mid-level API.
IN_BOTH = {"FeatureConfig", "TableConfig"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE_LINES = re.compile(r"^(?:>>> )?((?:from|import) podembed.*)$", re.MULTILINE)
FORMER_NAME = re.compile(rf"(?<![\w./'\"])(?:{'|'.join(FLOORS)})\.(?!json)[a-zA-Z_]")


def on_page(place: str) -> list[str]:
    """The names in the first column of a place's table."""
    text = PAGE.partition(f"\n## `{place}`\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return re.findall(r"`(\w+)`", " ".join(rows))


@pytest.mark.parametrize("place", PLACES)
def test_the_page_lists_what_a_place_offers_each_name_once(place: str) -> None:
    module = importlib.import_module(place)
    assert sorted(on_page(place)) == sorted(module.__all__)


@pytest.mark.parametrize("place", PLACES)
def test_each_name_can_be_imported_and_is_offered_to_completion(place: str) -> None:
    module = importlib.import_module(place)
    for name in on_page(place):
        assert getattr(module, name) is not None
    assert set(on_page(place)) <= set(dir(module))


def test_a_name_has_one_place() -> None:
    names = [name for place in PLACES for name in importlib.import_module(place).__all__]
    assert {name for name in names if names.count(name) > 1} == IN_BOTH
    for name in IN_BOTH:
        assert getattr(podembed, name) is getattr(importlib.import_module("podembed.embedding"), name)


def test_a_public_class_name_means_one_class() -> None:
    where: defaultdict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(label(path))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_type_checkers_see_the_names_where_they_are_found_when_a_program_runs() -> None:
    seen = {}
    for node in ast.walk(parsed(ROOT / "podembed" / "__init__.py")):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("podembed."):
            seen |= {alias.name: (node.module or "").removeprefix("podembed.") for alias in node.names}
    assert seen == podembed._WHERE


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'podembed' has no attribute 'Trayner'"):
        _ = podembed.Trayner  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError, match="cannot import name 'HostWorker'"):
        exec("from podembed import HostWorker")


def test_importing_the_package_loads_neither_ray_nor_jax() -> None:
    code = "import podembed, sys; print(sorted({'jax', 'ray', 'numpy', 'typing'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert set(ast.literal_eval(done.stdout)) <= _of_a_bare_interpreter()


def _of_a_bare_interpreter() -> set[str]:
    """What an interpreter loads by itself, for the hooks of installed packages."""
    code = "import sys; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    return set(ast.literal_eval(done.stdout))


def statements(page: Path) -> list[str]:
    """The imports of ours in a page's code, each on one line."""
    joined = re.sub(r"\(\s*([\w\s,]+?),?\s*\)", lambda found: " ".join(found[1].split()), page.read_text("utf-8"))
    return CODE_LINES.findall(joined)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_import_public_names_alone(page: Path) -> None:
    for statement in statements(page):
        (node,) = ast.parse(statement).body
        assert isinstance(node, ast.ImportFrom)
        assert node.module in PLACES, statement
        assert {alias.name for alias in node.names} <= set(on_page(node.module)), statement


@pytest.mark.parametrize("job", ["criteo", "movielens"])
def test_jobs_to_copy_import_public_names_alone(job: str) -> None:
    path = ROOT / "jobs" / f"{job}.py"
    assert "Copy this file" in path.read_text("utf-8")
    of_ours = 0
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("podembed")]
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "podembed":
            assert node.module in PLACES, node.module
            assert {alias.name for alias in node.names} <= set(on_page(node.module)), node.module
            of_ours += 1
    assert of_ours >= 3


def test_the_pages_have_imports() -> None:
    assert sum(len(statements(page)) for page in PAGES) >= 8
    assert "from podembed import CheckpointConfig, FeatureConfig, JobConfig, ParquetData, RunConfig, " in "".join(
        statements(ROOT / "README.md")
    )


def told(path: Path) -> list[int]:
    """Lines of a module's texts that name a module of ours without `podembed.`; comments and docstrings are nobody's
    message, but those of a command's class and its fields are its help.
    """
    nodes = list(ast.walk(parsed(path)))
    silent = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)
    if not _is_of_the_command_line(path):
        silent = (*silent, ast.ClassDef)
    docstrings = {id(node.body[0].value) for node in nodes if isinstance(node, silent) and _has_docstring(node)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.lineno for node in texts if id(node) not in docstrings and FORMER_NAME.search(str(node.value))]


def _is_of_the_command_line(path: Path) -> bool:
    return label(path).startswith("jobs/cli/") or label(path) in ("jobs/chaos/command.py", "jobs/prepare/command.py")


def _has_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node) is not None


def test_messages_say_the_import_name() -> None:
    # What earlier versions recorded, and where names are found.
    allowed = {"workers/job/reference.py", "podembed/__init__.py"}
    found = {label(path): told(path) for path in MODULES if label(path) not in allowed}
    assert {name: lines for name, lines in found.items() if lines} == {}
