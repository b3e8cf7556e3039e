"""Where code lives: which room may import which, and how large folders and files may grow."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from tests.architecture.test_imports import FLOORS, MODULES, ROOT, label, nodes, parsed

MAX_FILES = 15
MAX_FILE_LINES = 400
MAX_OWN_IMPORTS = 15

# What each room, or file beside the rooms, imports of its own floor. A new arrow is a decision: it must not close a
# circle, and it should be one that a newcomer expects.
ARROWS = {
    "embedding/config": "initializers optimizers",
    "embedding/costs": "kernels",
    "embedding/table_spec": "buckets config optimizers",
    "embedding/initializers": "hashing",
    "embedding/optimizers": "row_optimizers",
    "embedding/row_optimizers": "kernels",
    "embedding/table": "buckets initializers kernels row_optimizers table_spec",
    "embedding/lookup": "buckets config kernels ragged table table_spec",
    "embedding/engine": "config kernels lookup ragged table table_spec",
    "embedding/features": "config hashing ragged",
    "embedding/replicas": "engine features ragged",
    "embedding/keras": "tracing",
    "embedding/tpu_config": "config optimizers",
    "embedding/tpu_embedding": "config engine features keras lookup optimizers ragged replicas table table_spec "
    "tpu_config tracing",
    "workers/faults": "storage",
    "workers/liveness": "faults processors storage tracing",
    "workers/data": "declared_types storage",
    "workers/columns": "data",
    "workers/formats": "columns data storage",
    "workers/input": "columns data formats job processors tracing",
    "workers/control": "declared_types",
    "workers/job": "control data declared_types formats model storage",
    "workers/mesh": "descriptors faults tracing",
    "workers/calibration": "data device host input job mesh processors storage",
    "workers/checkpoint": "liveness processors storage tracing",
    "workers/device": "checkpoint crew declared_types descriptors faults job liveness model storage tracing",
    "workers/host": "checkpoint crew data device faults input job liveness mesh processors storage tracing",
    "workers/actors": "device host job liveness processors",
    "workers/inference": "data device job model",
    "workers/stepwise": "actors checkpoint crew device host liveness mesh storage",
    "orchestrator/events": "api",
    "orchestrator/commit": "api events",
    "orchestrator/run": "api commit events",
    "orchestrator/fsck": "api commit planning run",
    "orchestrator/inspect": "api commit run",
    "orchestrator/sparsecore": "api commit inspect run",
    "orchestrator/group": "api commit events run",
    "orchestrator/tracing": "api events group",
    "orchestrator/decisions": "api events group",
    "orchestrator/cluster": "api decisions events group",
    "orchestrator/planning": "api commit decisions events prediction run",
    "orchestrator/driver": "api cluster commit decisions events group planning prediction run tracing",
    "orchestrator/inference": "api commit driver inspect run",
    "orchestrator/live": "api commit metrics run",
    "orchestrator/metrics": "api events",
    "orchestrator/reporters": "api events metrics",
    "orchestrator/report": "api commit inspect metrics run",
    "orchestrator/health": "api decisions events metrics",
    "orchestrator/prediction": "api cluster decisions",
    "orchestrator/outcomes": "api commit",
    "orchestrator/supervise": "api commit outcomes",
    "orchestrator/pod": "api events group",
    "orchestrator/pod_engine": "group pod",
    "orchestrator/strategy": "api cluster group pod pod_engine",
    "orchestrator/fitting": "api cluster driver events health metrics planning run",
    "orchestrator/trainer": "api events fitting reporters run",
    "jobs/prepare": "search_path",
    "jobs/datasets": "movielens_files prepare synthetic",
    "jobs/criteo": "datasets models",
    "jobs/criteo_files": "criteo prepare",
    "jobs/movielens": "datasets models",
    "jobs/papers": "criteo models movielens",
    "jobs/chaos": "built_in search_path synthetic",
    "jobs/inference": "search_path",
    "jobs/cli": "built_in chaos criteo_files inference movielens prepare search_path synthetic watching",
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


def test_rooms_import_what_the_plan_says() -> None:
    planned = {here: {f"{here.split('/')[0]}/{name}" for name in there.split()} for here, there in ARROWS.items()}
    assert arrows() == planned


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


def test_folders_have_few_files() -> None:
    files = [*MODULES, *(ROOT / "tests").rglob("*.py")]
    counts = Counter(label(path.parent) for path in files if path.name != "__init__.py")
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_every_room_says_what_lives_in_it_and_what_to_read_first() -> None:
    rooms = {path.parent for path in MODULES} - {ROOT / floor for floor in FLOORS}
    told = {label(folder): ast.get_docstring(parsed(folder / "__init__.py")) or "" for folder in rooms}
    silent = [name for name, text in told.items() if "first" not in text or not 2 <= len(text.splitlines()) <= 9]
    assert silent == []


def test_files_are_short_and_import_little() -> None:
    files = [path for path in MODULES if path.name != "__init__.py"]
    long = {label(path) for path in files if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES}
    hungry = {label(path) for path in files if len(own_imports(path)) > MAX_OWN_IMPORTS}
    assert (long, hungry) == (set(), set())
