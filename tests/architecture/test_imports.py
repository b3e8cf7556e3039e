"""Rules about the source that no type checker knows: which floor imports which, who may know Ray, and sizes that one
can read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A floor may import itself and those below it.
FLOORS = ("embedding", "workers", "orchestrator", "serving", "tools", "jobs")
# Rooms of the lower floors that the rest of the core imports nothing of. An annex may import the annexes below it.
CORE = ("embedding", "workers", "orchestrator")
ANNEXES = ("embedding/tf", "workers/stepwise", "orchestrator/stepwise")
# The public face names what it imports when it is used.
FACES = {"embedding/__init__.py"}
# Ports that look storage and devices up by name, so that a program may import the lowest floor alone.
KNOWS_ABOVE = {"embedding/tf/engine/device_tables.py", "embedding/tf/engine/table_storage.py"}
KNOWS_RAY = {
    "workers/actors.py",
    "workers/stepwise/actors.py",
    "orchestrator/cluster/ray_backend.py",
    "orchestrator/cluster/ray_calls.py",
    "orchestrator/cluster/agent_ports.py",
    "orchestrator/cluster/cluster_supervisor.py",
    "orchestrator/cluster/places.py",
    "orchestrator/cluster/connection.py",
    "jobs/supervise/ray_jobs.py",
    "orchestrator/cluster/ray_nodes.py",
    "orchestrator/cluster/slices/backend.py",
    "orchestrator/cluster/slices/holding.py",
    "orchestrator/stepwise/strategy.py",
    "tools/metrics/ray_metrics.py",
    "orchestrator/cluster/worker_path.py",
    "orchestrator/cluster/job_modules.py",
}
# Files, sockets, processes and threads are the business of `workers`.
NOT_IN_EMBEDDING = {
    "asyncio",
    "concurrent",
    "fsspec",
    "multiprocessing",
    "mmap",
    "pyarrow",
    "ray",
    "select",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
}
READS_ENVIRONMENT = {
    "jobs/chaos/command.py",
    "jobs/cli/main.py",
    "jobs/search_path.py",
    "orchestrator/cluster/ray_backend.py",
    "orchestrator/cluster/connection.py",
    "orchestrator/cluster/own_cluster.py",
    "orchestrator/run/run.py",
    # Hands its own to the processes that it starts.
    "serving/server/workers.py",
    "workers/actors.py",
}
# Time is read and waited for here; elsewhere it is an argument, so that tests need not wait.
READS_CLOCK = {
    "jobs/chaos/command.py",
    "jobs/chaos/oracles.py",
    "jobs/chaos/round.py",
    "jobs/chaos/rounds.py",
    "jobs/check_device/child.py",
    "jobs/check_device/speeds.py",
    "jobs/cli/fitting.py",
    "jobs/cli/main.py",
    "jobs/prepare/progress.py",
    "orchestrator/api/clock.py",
    "orchestrator/cluster/marked_processes.py",
    "orchestrator/cluster/own_cluster.py",
    "orchestrator/cluster/places.py",
    "orchestrator/cluster/processes.py",
    "orchestrator/cluster/slices/backend.py",
    "jobs/reporters/console.py",
    "jobs/event_log.py",
    "orchestrator/run/input_record.py",
    "orchestrator/run/job_settings.py",
    "jobs/supervise/ray_jobs.py",
    "tools/preflight/child.py",
    "workers/tracing/recorder.py",
    "workers/checkpoint/background_save.py",
    "workers/checkpoint/frozen_rows.py",
    "workers/checkpoint/file_threads.py",
    "workers/device/doorway.py",
    "workers/device/compile_cache.py",
    "workers/device/gang.py",
    "workers/device/measures/jax_profile.py",
    "workers/device/model_step.py",
    "workers/device/process.py",
    "workers/device/shared_memory.py",
    "workers/device/waiting_threads.py",
    "workers/host/survivors/moves.py",
    "workers/host/survivors/surviving_shard.py",
    "workers/host/survivors/verification.py",
    "workers/liveness/progress.py",
}
CLOCK_CALL = re.compile(r"\btime\.(?:monotonic|perf_counter|process_time|thread_time|time|sleep)(?:_ns)?\(")
NEVER = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
MAX_FUNCTION_LINES = 80

MODULES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file. Many rules look at them, and to walk a tree takes longer than to go through a tuple."""
    return tuple(ast.walk(parsed(path)))


@cache
def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_for_types(node: ast.AST) -> bool:
    """Whether it is an `if TYPE_CHECKING:` block, which never runs."""
    return isinstance(node, ast.If) and any(
        "TYPE_CHECKING" in (getattr(part, "id", ""), getattr(part, "attr", "")) for part in ast.walk(node.test)
    )


def without_types(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of what may run."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not is_for_types(child)]


@cache
def imported(path: Path, *, with_types: bool = True) -> frozenset[str]:
    """Full names of all modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in nodes(path) if with_types else without_types(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{label(path)}:{node.lineno} imports relatively"
            names.add(node.module or "")
    return frozenset(names)


def packages(path: Path, *, with_types: bool = True) -> set[str]:
    """First parts of the names that a file imports; of our own modules the floor, as in `embedding`."""
    return {name.removeprefix("podembed.").split(".")[0] for name in imported(path, with_types=with_types)}


def offenders(found: Callable[[Path], object], *, below: str = "") -> dict[str, object]:
    """What `found` gives for each module, where it gives anything."""
    answers = {label(path): found(path) for path in MODULES if label(path).startswith(below)}
    return {name: answer for name, answer in answers.items() if answer}


def calls(path: Path) -> list[tuple[str, int]]:
    """Plain names that are called, and where."""
    found = [node for node in nodes(path) if isinstance(node, ast.Call)]
    return [(node.func.id, node.lineno) for node in found if isinstance(node.func, ast.Name)]


def test_modules_have_one_name() -> None:
    """A module that is imported as `workers.x` beside `podembed.workers.x` is there twice."""
    ours = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    found = {label(path): {name for name in imported(path) if name.split(".")[0] in FLOORS} for path in ours}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_every_floor_can_be_reached_by_its_name() -> None:
    for floor in FLOORS:
        assert (ROOT / "podembed" / floor).resolve() == (ROOT / floor).resolve()


def test_the_floors_are_there() -> None:
    assert {label(path).split("/")[0] for path in MODULES} == set(FLOORS)
    assert {name for name in KNOWS_RAY if (ROOT / name).exists()} >= {
        "workers/actors.py",
        "orchestrator/cluster/ray_backend.py",
    }


def test_imports_go_down() -> None:
    def upward(path: Path) -> set[str]:
        floor = FLOORS.index(path.relative_to(ROOT).parts[0])
        return packages(path) & {*FLOORS[floor + 1 :], "tests", "benchmarks"}

    assert offenders(upward) == {}


OURS = re.compile(rf"(?:podembed\.)?((?:{'|'.join(FLOORS)})(?:\.\w+)+)")


def named(path: Path) -> set[str]:
    """Modules of ours that a file imports, or names in a string of nothing else, as `importlib` takes them."""
    texts = [node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = [OURS.fullmatch(name) for name in {*imported(path), *texts}]
    return {match.group(1).replace(".", "/") for match in found if match}


def lies_in(name: str, rooms: tuple[str, ...]) -> bool:
    return any(f"{name}/".startswith(f"{room}/") for room in rooms)


def test_the_core_names_no_annex() -> None:
    def annexes(path: Path) -> set[str]:
        is_core = label(path).startswith(CORE) and not lies_in(label(path), ANNEXES) and label(path) not in FACES
        return {name for name in named(path) if lies_in(name, (*ANNEXES, "serving", "tools")) and is_core}

    assert offenders(annexes) == {}


def test_an_annex_knows_those_below_alone() -> None:
    """`serving` and `tools` read what the step-by-step mode leaves, by `workers/stepwise`."""

    def above(path: Path) -> set[str]:
        own = next((annex for annex in ANNEXES if lies_in(label(path), (annex,))), "")
        return {name for name in named(path) if own and lies_in(name, ANNEXES[ANNEXES.index(own) + 1 :])}

    assert set(offenders(above)) == KNOWS_ABOVE


def test_a_kind_of_store_is_named_where_tables_are_made_alone() -> None:
    def ram(path: Path) -> set[str]:
        is_outside = not lies_in(label(path), ("embedding/table/stores",)) and label(path) != "embedding/table/table.py"
        return {name for name in named(path) if name.startswith("embedding/table/stores/ram") and is_outside}

    assert offenders(ram) == {}


def test_no_cycle_of_modules() -> None:
    """Imports that run when a module is loaded form no cycle; those inside functions may."""
    names = {".".join(("podembed", *path.relative_to(ROOT).with_suffix("").parts)): path for path in MODULES}
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        found = set()
        for node in parsed(path).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                # `from package import module` and `from package.module import name`.
                found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        edges[name] = found & names.keys()
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in names:
        visit(name, ())


def test_ray_lives_in_few_files() -> None:
    assert set(offenders(lambda path: packages(path) & {"ray"})) <= KNOWS_RAY


def test_the_lowest_floor_does_no_io_and_starts_no_thread() -> None:
    found = offenders(lambda path: packages(path, with_types=False) & NOT_IN_EMBEDDING, below="embedding/")
    # Memory without a file.
    assert found == {"embedding/kernels/arrays.py": {"mmap"}}
    speaks = {"open", "print", "input"}
    assert offenders(lambda path: [call for call in calls(path) if call[0] in speaks], below="embedding/") == {}


def test_nothing_is_unpickled_or_evaluated() -> None:
    assert offenders(lambda path: packages(path) & NEVER) == {}
    assert offenders(lambda path: [call for call in calls(path) if call[0] in ("eval", "exec", "__import__")]) == {}

    def allows_pickle(path: Path) -> list[int]:
        given = [node for node in nodes(path) if isinstance(node, ast.keyword) and node.arg == "allow_pickle"]
        return [node.value.lineno for node in given if ast.unparse(node.value) != "False"]

    assert offenders(allows_pickle) == {}


def test_nothing_is_checked_by_assert() -> None:
    """`python -O` drops asserts; what users can get wrong raises a sentence instead. `x is not None` only tells a type
    checker.
    """

    def asserts(path: Path) -> list[int]:
        found = [node for node in nodes(path) if isinstance(node, ast.Assert)]
        return [node.lineno for node in found if not ast.unparse(node.test).endswith(" is not None")]

    assert offenders(asserts) == {}


def test_every_module_says_what_it_owns() -> None:
    def is_silent(path: Path) -> bool:
        text = ast.get_docstring(parsed(path)) or ""
        return bool(path.read_text(encoding="utf-8").strip()) and not text.rstrip().endswith((".", ":", "`", ")"))

    assert offenders(is_silent) == {}


def test_functions_can_be_read_at_a_sitting() -> None:
    def long_functions(path: Path) -> list[str]:
        found = [n for n in nodes(path) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        return [node.name for node in found if (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES]

    assert offenders(long_functions) == {}


def test_no_exception_is_hidden() -> None:
    def hidden(path: Path) -> list[int]:
        handlers = [node for node in nodes(path) if isinstance(node, ast.ExceptHandler)]
        broad = [node for node in handlers if not node.type or ast.unparse(node.type) in ("Exception", "BaseException")]
        return [n.lineno for n in broad if all(isinstance(part, ast.Pass | ast.Continue) for part in n.body)]

    assert offenders(hidden) == {}


def test_environment_variables_are_read_by_few() -> None:
    """Settings are arguments; below the command line only the cluster's own variables are read."""

    def uses(path: Path) -> list[str]:
        return re.findall(r"os\.(?:environ|getenv)", path.read_text(encoding="utf-8"))

    assert set(offenders(uses)) <= READS_ENVIRONMENT


def test_the_clock_is_read_by_few() -> None:
    def reads(path: Path) -> list[str]:
        return CLOCK_CALL.findall(path.read_text(encoding="utf-8"))

    assert set(offenders(reads)) == READS_CLOCK


def test_nothing_is_left_to_do_later() -> None:
    words = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
    assert offenders(lambda path: words.findall(path.read_text(encoding="utf-8"))) == {}
