"""What is said of a process that died, from the words of Ray 2.60."""

from __future__ import annotations

import re

import pytest
from ray.exceptions import RaySystemError

from podembed.orchestrator.api.run_errors import JobRefused
from podembed.orchestrator.group.worker_errors import death, failure_of
from podembed.workers.liveness.worker import Worker
from podembed.workers.mesh.mesh_errors import MeshError
from podembed.workers.storage.storage_errors import StorageFull, UnsafeName

CREATION = (
    "The actor died because of an error raised in its creation task, \x1b[36mray::_HostActor.__init__()\x1b[39m "
    "(pid=24289, ip=10.0.0.7, actor_id=663c, repr=<podembed.workers.actors._create_fake_actor_class object>)\n"
    "           ^^^^^^^^\n"
    "RuntimeError: The actor with name _HostActor failed to import on the worker.\n\n"
    "ray::_HostActor.__init__() (pid=24289, ip=10.0.0.7)\n"
    "{}\n"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            CREATION.format("ModuleNotFoundError: No module named 'podembed'"),
            "it could not start on 10.0.0.7: ModuleNotFoundError: No module named 'podembed'. Install it there, in the "
            "environment that Ray runs in.",
        ),
        (CREATION.format("MemoryError"), "it could not start on 10.0.0.7: MemoryError."),
        (
            CREATION.format("ValueError: Found no rows.\nExpected some."),
            "it could not start on 10.0.0.7: ValueError: Found no rows. Expected some.",
        ),
        (CREATION.format("lib.OddError: " + "x" * 999), f"it could not start on 10.0.0.7: lib.OddError: {'x' * 186}."),
        (
            CREATION.format("ImportError: cannot import name 'new' from 'podembed'"),
            "it could not start on 10.0.0.7: ImportError: cannot import name 'new' from 'podembed'.",
        ),
        (
            "The actor died unexpectedly.\n\texit type: SYSTEM_ERROR exit detail: Worker exits. Some common causes: 1",
            "Worker exits.",
        ),
        ("\n  Killed.\nMore.", "Killed."),
        ("", "no message"),
    ],
)
def test_a_death_is_said_with_its_cause(text: str, said: str) -> None:
    assert death(text) == said


def test_a_module_that_a_machine_lacks_is_named_with_what_to_do() -> None:
    """Ray could not unpack the job there. Its own report is a traceback of its own."""
    lost = RaySystemError("System error: No module named 'tiny.parts'\ntraceback: Traceback (most recent call last):")
    failure = failure_of(Worker("host", 1), lost, details="a traceback")
    assert failure.refusal is JobRefused
    assert failure.message.startswith("Found no module 'tiny.parts' on the machine of host 1,")
    assert "py_modules" in failure.message
    other = failure_of(Worker("host", 1), RaySystemError("System error: of another kind"))
    assert other.refusal is None


@pytest.mark.parametrize(
    ("error", "is_storage"),
    [
        (StorageFull("write 'x'", OSError(28, "full")), True),
        (OSError(5, "input/output error"), True),
        (UnsafeName("../x", "leads outside"), False),
        (MeshError("host 1 is gone"), False),
        (ValueError("a bug"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_save_alone_is_lost_only_to_a_storage_that_may_recover(error: Exception, is_storage: bool) -> None:
    assert failure_of(Worker("host", 0), error).is_storage == is_storage


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Unspeakable(), "Unspeakable: no message, since its __str__ raised RuntimeError"),
        (
            ValueError("\x1b[2Jhere" + "x" * 200_000 + "there"),
            r"ValueError: \?\[2Jherex+ \.\.\. .* left out \.\.\. x+there",
        ),
    ],
)
def test_any_exception_is_said_in_words_that_a_terminal_takes(error: Exception, said: str) -> None:
    failure = failure_of(Worker("host", 0), error, details=f"Traceback\n\t{error.args}" * 9)
    assert re.fullmatch(said, failure.message)
    assert "\x1b" not in failure.message + failure.details
    assert len(failure.message + failure.details) < 20_000
