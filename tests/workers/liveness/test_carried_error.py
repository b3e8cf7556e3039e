"""Exceptions that another process gets as they were raised."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from ray import cloudpickle

from podembed.embedding.tf.engine.order import OrderError
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.descriptors import DescriptorsExhausted
from podembed.workers.liveness.carried_error import CarriedError, carried, original, trace_of, words_of
from podembed.workers.mesh.mesh_errors import PeerLost
from podembed.workers.storage.storage_errors import NameNotFound, StorageFull, StoreUnavailable, WrongSize
from podembed.workers.storage.strict_json import DocumentRefused


def copied(value: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(value))  # type: ignore[attr-defined]


class Prefixed(Exception):
    """Can be copied, and says it twice then."""

    def __init__(self, why: str) -> None:
        super().__init__(f"prefix: {why}")


class Slotted(ValueError):
    """With a base that looks at its arguments, and an attribute."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


@pytest.mark.parametrize(
    "error",
    [
        ChunkDamaged("name", "found", "expected", place="table 't'"),
        DocumentRefused("name", "found", "expected"),
        NameNotFound("name", "/here"),
        StorageFull("a bucket", OSError(28, "No space left on device")),
        StoreUnavailable("read", attempts=3, elapsed_s=1.0, last=OSError("reset")),
        WrongSize("name", found_bytes=3, expected="4"),
        Prefixed("mine"),
        Slotted(code=3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_pickle_cannot_make_again_arrives_as_it_was_raised(error: Exception) -> None:
    sent = carried(error, copied)
    assert isinstance(sent, CarriedError)
    arrived = original(copied(sent))
    assert type(arrived) is type(error)
    assert (str(arrived), vars(arrived).keys()) == (str(error), vars(error).keys())
    assert str(sent) == f"{type(error).__name__}: {error}"


class OfTheScript(KeyError):
    pass


@pytest.mark.parametrize(
    "error",
    [OfTheScript("a"), OrderError("b"), PeerLost(1, "gone"), OSError(5, "bad", "file"), DescriptorsExhausted("c", "d")],
    ids=lambda error: type(error).__name__,
)
def test_what_can_be_copied_leaves_as_it_is(error: Exception) -> None:
    assert carried(error, copied) is error
    assert original(error) is error


def test_a_part_that_cannot_be_copied_is_left_out() -> None:
    error = KeyError("mine", threading.Lock())
    error.lock, error.code = threading.Lock(), 3  # type: ignore[attr-defined]
    arrived = original(copied(carried(error, copied)))
    assert type(arrived) is KeyError
    assert (arrived.args[0], vars(arrived)) == ("mine", {"code": 3})
    assert "lock" in arrived.args[1]


def test_of_a_class_that_cannot_be_copied_the_words_arrive() -> None:
    class Local(Exception):
        pass

    def no_copy_of_local(value: Any) -> Any:
        if isinstance(value, Local) or (isinstance(value, CarriedError) and value.args[0] is Local):
            raise TypeError("no")
        return copied(value)

    arrived = original(copied(carried(Local("mine"), no_copy_of_local)))
    assert type(arrived) is RuntimeError
    assert "Local: mine" in str(arrived)


class Unspeakable(Exception):
    """Has no words, and cannot be copied as it is."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __reduce__(self) -> Any:
        raise TypeError("not to be copied")


@pytest.mark.parametrize("value", [1, threading.Lock(), Unshowable()])
def test_an_exception_without_words_arrives(value: Any) -> None:
    sent = copied(carried(Unspeakable(value), copied))
    assert words_of(original(sent)) == "no message, since its __str__ raised RuntimeError"
    assert "Unspeakable" in trace_of(original(sent))
