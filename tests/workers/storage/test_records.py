"""Records to JSON and back, strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.workers.storage.records import decode, encode, from_document, to_document
from podembed.workers.storage.strict_json import DocumentRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    key: str
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    count: int
    flag: bool
    parent: str | None
    parts: tuple[Inner, ...]
    lists: Mapping[str, tuple[int, ...]]


int64 = st.integers(-(2**63), 2**63 - 1)
outers = st.builds(
    Outer,
    count=int64,
    flag=st.booleans(),
    parent=st.none() | st.text(max_size=5),
    parts=st.lists(
        st.builds(Inner, key=st.text(max_size=5), weight=st.floats(allow_nan=False, allow_infinity=False))
    ).map(tuple),
    lists=st.dictionaries(st.text(max_size=5), st.lists(int64, max_size=3).map(tuple), max_size=3),
)
GOOD = {"count": 1, "flag": True, "parent": None, "parts": [{"key": "k", "weight": 0.5}], "lists": {"a": [1, 2]}}


@given(outers)
def test_records_come_back(record: Outer) -> None:
    assert decode(Outer, "x", encode(record)) == record


def test_the_document_is_plain() -> None:
    record = from_document(Outer, "x", GOOD)
    assert to_document(record) == GOOD
    assert record.parts[0] == Inner(key="k", weight=0.5)


def test_a_whole_number_is_a_float_too() -> None:
    assert from_document(Inner, "x", {"key": "k", "weight": 2}) == Inner(key="k", weight=2.0)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"count": "1"}, "Outer.count"),
        ({"count": True}, "Outer.count"),
        ({"count": 1.0}, "Outer.count"),
        ({"flag": 1}, "Outer.flag"),
        ({"parent": 3}, "Outer.parent"),
        ({"parts": {}}, "Outer.parts"),
        ({"parts": [3]}, r"Outer.parts\[\]"),
        ({"parts": [{"key": "k"}]}, "weight"),
        ({"parts": [{"key": "k", "weight": 1, "more": 2}]}, "more"),
        ({"lists": []}, "Outer.lists"),
        ({"lists": {"a": 3}}, "Outer.lists.a"),
        ({"lists": {"a": [None]}}, "null at Outer.lists.a"),
        ({"unknown": 3}, "unknown"),
    ],
)
def test_the_first_wrong_member_is_named(change: dict[str, object], where: str) -> None:
    with pytest.raises(DocumentRefused, match=where):
        from_document(Outer, "x", GOOD | change)


@pytest.mark.parametrize("missing", sorted(GOOD))
def test_every_member_must_be_there(missing: str) -> None:
    with pytest.raises(DocumentRefused, match=missing):
        from_document(Outer, "x", {key: value for key, value in GOOD.items() if key != missing})


@pytest.mark.parametrize("document", [None, 3, [], "x"])
def test_other_documents_are_refused(document: object) -> None:
    with pytest.raises(DocumentRefused):
        from_document(Outer, "x", document)
