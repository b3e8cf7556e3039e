from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.hashing import mix64
from podembed.workers.columns.string_keys import string_keys
from podembed.workers.columns.vocabulary import Vocabulary, load_vocabulary, text_of
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import CsvData
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, evaluation_plan

words = st.text(st.characters(exclude_characters="\n\r\ufeff", exclude_categories=["Cs"]), min_size=1, max_size=20)


def key_of(text: bytes) -> int:
    """The rule of `string_keys`, in Python."""
    key = mix64(np.array([len(text)], np.uint64))
    for at in range(0, len(text), 8):
        key = mix64(key ^ np.uint64(int.from_bytes(text[at : at + 8], "little")))
    return int(key.astype(np.int64)[0])


@settings(deadline=None)
@given(st.lists(st.text(max_size=30), max_size=10), st.data())
def test_keys_of_strings_follow_their_rule_in_slices_too(strings: list[str], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(strings)))
    column = pa.array(strings, pa.large_string())[first:]
    keys = np.empty(len(column), np.int64)
    string_keys(*text_of(column), keys)
    assert keys.tolist() == [key_of(text.encode()) for text in strings[first:]]


def test_keys_are_fixed_for_good() -> None:
    """A change here gives every string of a saved table another row."""
    keys = np.empty(4, np.int64)
    string_keys(*text_of(pa.array(["", "a", "12345678", "123456789"], pa.large_string())), keys)
    assert keys.tolist() == [-2152535657050944081, 6774081908283191102, -8945296240283771741, 9003943604911055402]


@settings(deadline=None)
@given(st.lists(words, min_size=1, max_size=40, unique=True), st.lists(words, max_size=10), st.integers(1, 5))
def test_strings_have_the_row_of_their_line_and_others_row_0(
    known: list[str], others: list[str], reserved: int
) -> None:
    vocabulary = Vocabulary("v", "".join(f"{word}\n" for word in known).encode())
    wanted = [*others, *reversed(known), *others]
    rows = vocabulary.rows_of_strings(pa.array(wanted, pa.large_string()), num_reserved=reserved)
    assert rows.tolist() == [known.index(word) + reserved if word in known else 0 for word in wanted]
    assert [vocabulary.line(at) for at in range(len(known))] == known


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40, unique=True), st.integers(1, 5))
def test_integers_have_the_row_of_their_line(known: list[int], reserved: int) -> None:
    vocabulary = Vocabulary("v", "\n".join(map(str, known)).encode())
    wanted = [*reversed(known), 7, -1]
    rows = vocabulary.rows_of_integers(np.array(wanted), num_reserved=reserved)
    assert rows.tolist() == [known.index(value) + reserved if value in known else 0 for value in wanted]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no value"),
        (b"a\n\nb\n", "nothing in line 2"),
        (b"\n", "nothing in line 1"),
        (b"a\nb\xff\n", "not UTF-8 in line 2"),
        (b"a\nb\nc\nb\n", "'b' in lines 2 and 4"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"{message} of the vocabulary .*words\.txt"):
        load_vocabulary(str(path))


@pytest.mark.parametrize("line", ["red", "07", "1.5", "+1", " 1", str(2**63)])
def test_a_vocabulary_of_integers_holds_integers(line: str) -> None:
    vocabulary = Vocabulary("v", f"12\n{line}\n".encode())
    with pytest.raises(InputError, match="in line 2 of the vocabulary v"):
        vocabulary.rows_of_integers(np.array([12]), num_reserved=1)


def test_a_relative_path_holds_for_hosts_in_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brands.txt").write_text("a\nb\n")
    (tmp_path / "clicks.csv").write_text("brand,y\nb,1\nc,0\n")
    monkeypatch.chdir(tmp_path)
    brand = IdColumn("brand", vocabulary="brands.txt")
    data = CsvData("clicks.csv", label="y", features={"brand": brand}, strings=("brand",)).resolved({"brand": 3})
    index = build_index(data)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    reader = InputReader(data, index, evaluation_plan(index, num_lanes=1, batch_size=2), [0])
    assert reader.read(0).features["brand"].to_lists() == [[2], [0]]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("is_ended", [True, False])
def test_line_ends_of_other_systems_and_byte_order_marks_are_no_part_of_values(
    end: str, mark: str, is_ended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    text = mark + end.join(["17", "4 ", "250"]) + end * is_ended
    vocabulary = Vocabulary("v.txt", text.encode())
    assert vocabulary.lines.to_pylist() == ["17", "4 ", "250"]
    plain = Vocabulary("v.txt", b"17\n4 \n250\n")
    assert vocabulary.digest(3) == plain.digest(3)
    strings = pa.array(["250", "17", "x"], pa.large_string())
    assert vocabulary.rows_of_strings(strings, num_reserved=1).tolist() == [3, 1, 0]
    assert not caplog.records


def test_carriage_returns_of_some_lines_are_values_and_said(caplog: pytest.LogCaptureFixture) -> None:
    assert Vocabulary("v.txt", b"a\r\nb\n").lines.to_pylist() == ["a\r", "b"]
    assert "at the end of 1 of 2 lines of the vocabulary v.txt" in caplog.text
