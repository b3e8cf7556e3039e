"""Names of the workers' methods stand as text in one module of each mode; everybody else calls methods that have
types.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import pytest

from podembed.workers.device.process import DeviceProcess
from podembed.workers.host.host import HostWorker
from podembed.workers.stepwise.device import StepwiseDevice
from podembed.workers.stepwise.host import StepwiseHost
from tests.architecture.test_imports import MODULES, label, nodes

KNOWS_NAMES = {"orchestrator/group/calls.py", "orchestrator/stepwise/calls.py"}
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


def test_methods_of_workers_are_named_in_these_modules() -> None:
    found = {label(path): sorted(set(named_methods(nodes(path)))) for path in MODULES if label(path) not in OTHER_CALLS}
    assert {where for where, names in found.items() if names} == KNOWS_NAMES


def test_every_named_method_is_one_of_a_worker() -> None:
    """A call whose worker has no such method would fail when it is made, and not before."""
    sent = {
        node.args[0].value
        for path in MODULES
        if label(path) in KNOWS_NAMES
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("call", "background", "control", "directly")
        and isinstance(node.args[0], ast.Constant)
    }
    assert sent <= METHODS
