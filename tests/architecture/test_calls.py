"""Nobody names the workers' methods as text: they are called as methods of their classes, which have types."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import pytest

from podembed.workers.device.process import DeviceProcess
from podembed.workers.host.host import HostWorker
from podembed.workers.stepwise.device import StepwiseDevice
from podembed.workers.stepwise.host import StepwiseHost
from tests.architecture.test_imports import MODULES, label, nodes

# Names of file operations, which go to a storage and not to a worker.
OTHER_CALLS = {"workers/storage/retry.py"}
WORKERS = (HostWorker, DeviceProcess, StepwiseHost, StepwiseDevice)
METHODS = {name for worker in WORKERS for name in vars(worker) if not name.startswith("_")}


def named_methods(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Methods of workers that are called, or looked for, by their names as text."""
    for node in nodes:
        if isinstance(node, ast.Call):
            # Of `handle.call("train", ...)` and `getattr(worker, "train")`; other texts may be equal to a name.
            is_transport = isinstance(node.func, ast.Attribute) and node.func.attr in TRANSPORT
            is_getattr = isinstance(node.func, ast.Name) and node.func.id == "getattr"
            first = node.args[:1] if is_transport else node.args[1:2] if is_getattr else []
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == "method":
            first = [part for other in node.comparators for part in ast.walk(other)]
        else:
            continue
        yield from (one.value for one in first if isinstance(one, ast.Constant) and one.value in METHODS)


TRANSPORT = {
    "call",
    "call_directly",
    "directly",
    "background",
    "control",
    "call_hosts",
    "call_devices",
    "_all",
    "remote",
}


@pytest.mark.parametrize(
    "source",
    [
        'handle.call("train", 1)',
        'handle.control("abort", why)',
        'getattr(worker, "drain")()',
        'method in ("start", "x")',
    ],
)
def test_a_name_as_text_is_found(source: str) -> None:
    assert list(named_methods(ast.walk(ast.parse(source))))


def test_methods_of_workers_are_named_nowhere() -> None:
    found = {label(path): sorted(set(named_methods(nodes(path)))) for path in MODULES if label(path) not in OTHER_CALLS}
    assert not {where: names for where, names in found.items() if names}


def test_arguments_of_methods_go_by_their_places() -> None:
    """`Calls` hands on no others, though types would allow them."""
    named = [
        f"{label(path)}:{node.lineno}"
        for path in MODULES
        if label(path).startswith(("orchestrator/", "tools/tracing/"))
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TRANSPORT
        if node.args and isinstance(node.args[0], ast.Attribute) and node.args[0].attr in METHODS and node.keywords
    ]
    assert named == []
