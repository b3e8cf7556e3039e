from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from podembed.jobs.text.criteo_lines import (
    FIELD_NAMES,
    NUM_CATEGORIES,
    NUM_INTEGERS,
    LineFault,
    parse_lines,
    read_line,
)
from tests.long_tests import examples

labels = st.sampled_from([b"0", b"1"])
integers = st.just(b"") | st.integers(-(2**31), 2**31 - 1).map(lambda value: str(value).encode())
categories = st.just(b"") | st.integers(0, 2**32 - 1).map(lambda value: f"{value:08x}".encode())
# Bytes that come near the grammar find more than random ones.
near = st.text("0123456789abcdefABCDEFgG-+ \t.\r", max_size=12).map(str.encode)
odd = near | st.binary(max_size=12).map(lambda text: text.replace(b"\n", b"")) | st.just(b"9" * 40)


@st.composite
def good_lines(draw: st.DrawFn) -> bytes:
    fields = [
        draw(labels),
        *(draw(integers) for _ in range(NUM_INTEGERS)),
        *(draw(categories) for _ in range(NUM_CATEGORIES)),
    ]
    return b"\t".join(fields)


@st.composite
def any_lines(draw: st.DrawFn) -> bytes:
    """Good lines, lines with one field or the number of fields spoilt, and nonsense."""
    fields = draw(good_lines()).split(b"\t")
    kind = draw(st.integers(0, 4))
    if kind == 0:
        fields[draw(st.integers(0, len(fields) - 1))] = draw(odd)
    elif kind == 1:
        fields = fields[: draw(st.integers(0, len(fields)))]
    elif kind == 2:
        fields.append(draw(odd))
    elif kind == 3:
        return draw(odd)
    return b"\t".join(fields)


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(any_lines(), max_size=4))
@example([b"", b""])
@example([b"1" + b"\t" * 39])
@example([b"1" + b"\t" * 38, b"1" + b"\t" * 40])
@example([b"0\t2147483647\t-2147483648\t2147483648" + b"\t" * 36])
@example([b"0\t-\t0" + b"\t" * 37, b"0\t00000000005" + b"\t" * 38, b"0\t0000000005" + b"\t" * 38])
def test_both_readers_agree(lines: list[bytes]) -> None:
    parsed = parse_lines(b"".join(line + b"\n" for line in lines))
    assert len(parsed.is_good) == len(lines)
    for at, line in enumerate(lines):
        values = read_line(line)
        assert parsed.is_good[at] == (not isinstance(values, LineFault)), values
        if isinstance(values, LineFault):
            continue
        found: list[int | None] = [int(parsed.labels[at])]
        for number in range(NUM_INTEGERS):
            found.append(None if parsed.integer_is_empty[number, at] else int(parsed.integers[number, at]))
        for number in range(NUM_CATEGORIES):
            found.append(None if parsed.category_is_empty[number, at] else int(parsed.categories[number, at]))
        assert found == values


def line_with(**changed: bytes) -> bytes:
    fields = dict.fromkeys(FIELD_NAMES, b"") | {"label": b"1"}
    return b"\t".join((fields | changed).values())


def test_values_are_what_the_text_says() -> None:
    values = read_line(line_with(i0=b"-2", i12=b"007", c0=b"ffffffff", c25=b"0000abCD"))
    assert isinstance(values, list)
    named = dict(zip(FIELD_NAMES, values, strict=True))
    assert (named["label"], named["i0"], named["i12"], named["c0"], named["c25"]) == (1, -2, 7, 2**32 - 1, 0xABCD)
    assert named["i5"] is None
    assert named["c5"] is None


@pytest.mark.parametrize(
    ("line", "field", "found"),
    [
        (line_with(label=b"2"), "label", "'2'"),
        (line_with(label=b""), "label", "''"),
        (line_with(label=b"1.0"), "label", "'1.0'"),
        (line_with(i3=b"1.5"), "i3", "'1.5'"),
        (line_with(i3=b"2147483648"), "i3", "'2147483648'"),
        (line_with(i3=b"+1"), "i3", "'+1'"),
        (line_with(c7=b"123456789"), "c7", "'123456789'"),
        (line_with(c7=b"1234567"), "c7", "'1234567'"),
        (line_with(c7=b"0x123456"), "c7", "'0x123456'"),
        (line_with(c25=b"12345678\r"), "c25", r"'12345678\r'"),
        (line_with(c7=b"\xff\xfe345678"), "c7", r"'\\xff\\xfe345678'"),
        (line_with() + b"\t", "line", "41 fields"),
        (line_with()[:-1], "line", "39 fields"),
        (b"x" * 500, "line", "1 fields: '" + "x" * 60 + "'…"),
    ],
)
def test_faults_name_the_field_and_quote_it(line: bytes, field: str, found: str) -> None:
    fault = read_line(line)
    assert isinstance(fault, LineFault)
    assert fault.field == field
    assert fault.found.startswith(found)
