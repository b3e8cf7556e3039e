"""Rooms, the folders of a floor: none imports in a circle, and each says what lives in it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.architecture.test_imports import ANNEXES, CORE, FLOORS, MODULES, ROOT, label, lies_in, named, nodes, parsed

FEW_LINES = 80
ONE_RULE = "one row optimizer a file"
# Files of the core below `FEW_LINES` that one other file imports, and why they stay alone.
LONELY = {
    "embedding/row_optimizers/adagrad.py": ONE_RULE,
    "embedding/row_optimizers/momentum.py": ONE_RULE,
    "embedding/row_optimizers/sgd.py": ONE_RULE,
    "orchestrator/cluster/agent_ports.py": "its importer is a program, which begins to work when it is imported",
    "orchestrator/cluster/marked_processes.py": "what it knows of the process table is nobody else's business",
    "workers/device/waiting_threads.py": "what it knows of the threads of XLA is nobody else's business",
    "workers/faults/updates.py": "faults stay apart from what they strike",
    "workers/model/haiku_model.py": "one framework a file, imported with that framework alone",
}


def room(module: str) -> str:
    """`workers/host` of `workers.host.host`, and `workers/actors` of the file beside the rooms."""
    return "/".join(module.split(".")[:2])


@cache
def own_imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, without `podembed.`; also those inside functions and for types."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("podembed."):
            module = (node.module or "").removeprefix("podembed.")
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                is_module = (ROOT / inner.replace(".", "/")).with_suffix(".py").exists()
                found.add(inner if is_module else module)
    return found


def arrows() -> dict[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in MODULES:
        if path.name != "__init__.py":
            here = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
            of_floor = {room(other) for other in own_imports(path) if other.split(".")[0] == here.split("/")[0]}
            found[here] |= of_floor - {here}
    return {here: there for here, there in found.items() if there}


def test_no_circle_of_rooms() -> None:
    edges = arrows()
    done: set[str] = set()

    def visit(here: str, trail: tuple[str, ...]) -> None:
        assert here not in trail, " → ".join([*trail[trail.index(here) :], here])
        if here not in done:
            for there in sorted(edges.get(here, ())):
                visit(there, (*trail, here))
            done.add(here)

    for here in edges:
        visit(here, ())


def test_every_room_says_what_lives_in_it_and_what_to_read_first() -> None:
    rooms = {path.parent for path in MODULES} - {ROOT / floor for floor in FLOORS}
    told = {label(folder): ast.get_docstring(parsed(folder / "__init__.py")) or "" for folder in rooms}
    silent = [name for name, text in told.items() if "first" not in text or not 2 <= len(text.splitlines()) <= 9]
    assert silent == []


def test_the_map_names_every_room() -> None:
    """docs/architecture.md has a row for each folder of a floor, and for those of `embedding/tf`."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `([\w/]+)` \|", text.partition("## Processes")[0], re.MULTILINE))
    rooms = {label(path.parent) for path in MODULES}
    assert told == {room for room in rooms if len(room.split("/")) == 2 or room.startswith("embedding/tf/")}


def test_small_files_of_one_importer_have_a_reason() -> None:
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for path in [*MODULES, ROOT / "podembed" / "__init__.py"]:
        # Strings that name modules count as imports.
        for name in named(path) | {module.replace(".", "/") for module in own_imports(path)}:
            importers[f"{name}.py"].add(label(path))
    core = [path for path in MODULES if lies_in(label(path), CORE) and not lies_in(label(path), ANNEXES)]
    small = [path for path in core if len(path.read_text(encoding="utf-8").splitlines()) < FEW_LINES]
    lonely = {label(path) for path in small if len(importers[label(path)] - {label(path)}) == 1}
    assert lonely - LONELY.keys() == set()
    assert {name for name in LONELY if (ROOT / name).exists()} <= lonely
