"""Sealed documents: what was sealed comes back, and nothing else comes back."""

from __future__ import annotations

import hashlib
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.workers.storage.strict_json import DocumentRefused, canonical_bytes, parse_strictly, seal, unseal

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
documents = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda key: key != "sha256"), values, min_size=1, max_size=5
)


@given(documents)
def test_what_was_sealed_comes_back(document) -> None:
    assert unseal("x", seal(document)) == document


@given(documents)
def test_a_sealed_document_is_plain_json(document) -> None:
    parsed = json.loads(seal(document))
    assert len(parsed.pop("sha256")) == 64
    assert parsed == document


@given(documents, st.data())
def test_one_changed_byte_is_found(document, data) -> None:
    sealed = bytearray(seal(document))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DocumentRefused):
        unseal("x", bytes(sealed))


@given(documents, st.data())
def test_cut_and_extended_documents_are_found(document, data) -> None:
    sealed = seal(document)
    length = data.draw(st.integers(0, len(sealed) - 1))
    with pytest.raises(DocumentRefused):
        unseal("x", sealed[:length])
    with pytest.raises(DocumentRefused):
        unseal("x", sealed + data.draw(st.binary(min_size=1, max_size=5)))


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 17 + b"]" * 17,
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":9223372036854775808}',
        b'{"a":1,"a":2}',
        b'{"a":"\xff"}',
        b'{"a":1} x',
        b'"' + b"\\" * 3,
        b'"' * 100_001,
        b"",
        b"x" * 2000,
    ],
)
def test_hostile_documents_are_refused(text: bytes) -> None:
    with pytest.raises(DocumentRefused):
        parse_strictly("x", text, max_bytes=1 << 20)


def test_brackets_in_strings_do_not_count_as_depth() -> None:
    assert parse_strictly("x", json.dumps({"a": "[" * 500 + '"{\\'}).encode()) == {"a": "[" * 500 + '"{\\'}


def test_the_size_is_limited_before_parsing() -> None:
    with pytest.raises(DocumentRefused, match="at most 10"):
        parse_strictly("x", b'{"a":"0123456789"}', max_bytes=10)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_a_refusal(data: bytes) -> None:
    try:
        value = parse_strictly("x", data)
    except DocumentRefused:
        return
    assert json.loads(data) == value


def test_numbers_that_json_cannot_hold_are_not_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_bytes({"a": float("nan")})


@pytest.mark.parametrize("document", [{}, {"sha256": "x"}])
def test_documents_that_the_seal_would_garble_are_not_sealed(document) -> None:
    with pytest.raises(ValueError, match="sha256"):
        seal(document)


@pytest.mark.parametrize(("unit", "number"), [("[],", 1 << 20), ('{"a":0},', 1 << 20), ("0,", 1 << 23)])
def test_a_small_file_of_very_many_values_is_refused_before_they_are_built(unit: str, number: int) -> None:
    """Sealed as its writer would: the seal keeps nobody from forging."""
    body = b'{"tables":[' + unit.encode() * number + b"0]}"
    data = body[:-1] + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    tracemalloc.start()
    try:
        with pytest.raises(DocumentRefused, match="about .* values in .* lists and objects"):
            unseal("forged", data, max_bytes=256 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_text_is_measured_before_anything_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is a value or a name of, with escaped quotes or not, and also without an end."""
    fits = {"a": "x" * 40, "d": '"' * 32, "e": "\\" * 32, 'b"': ["y" * 40, {"z" * 40: 1}], "c": list(range(200))}
    assert unseal("f", seal(fits), max_text_bytes=64) == fits
    monkeypatch.setattr("json.loads", None)
    for long in ({"a": "x" * 65}, {"x" * 65: 1}, {"a": [1, {"b": "x" * 65}]}, {"a": '"' * 33}, {"a": "\\" * 33}):
        with pytest.raises(DocumentRefused, match="found a text of more than 64 bytes; expected shorter ones"):
            unseal("f", seal(long), max_text_bytes=64)
    with pytest.raises(DocumentRefused, match="found a text of"):
        parse_strictly("f", b'{"a":"' + b"x" * 80, max_text_bytes=64)
