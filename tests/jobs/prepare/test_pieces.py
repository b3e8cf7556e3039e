"""How text is cut: every line in one piece, whole, whatever the sizes."""

from __future__ import annotations

import gzip
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.jobs.prepare.pieces import plan_pieces
from podembed.jobs.text.blocks import TextError
from tests.long_tests import examples

# Lengths of lines; a 0 is a blank line.
FILES = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=30), min_size=1, max_size=5)


def write_file(path: Path, lengths: list[int], *, ends_in_newline: bool) -> None:
    """Lines of these lengths; letters tell them apart."""
    lines = [bytes([97 + at % 26]) * length for at, length in enumerate(lengths)]
    path.write_bytes(b"\n".join(lines) + (b"\n" if ends_in_newline else b""))


@settings(max_examples=examples(150), deadline=None)
@given(files=FILES, piece_bytes=st.integers(1, 400), ends_in_newline=st.booleans())
def test_every_line_is_in_one_piece(files: list[list[int]], piece_bytes: int, ends_in_newline: bool) -> None:
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{at}.txt" for at in range(len(files))]
        for path, lengths in zip(paths, files, strict=True):
            write_file(path, lengths, ends_in_newline=ends_in_newline)
        pieces = plan_pieces([str(path) for path in paths], piece_bytes=piece_bytes)
        assert [piece.number for piece in pieces] == list(range(len(pieces)))
        found: dict[str, bytes] = {str(path): b"" for path in paths}
        for piece in pieces:
            for span in piece.spans:
                assert span.lines_before() == found[span.path].count(b"\n")
                found[span.path] += b"".join(span.blocks())
        for path in paths:
            text = path.read_bytes()
            text += b"" if text.endswith(b"\n") or not text else b"\n"
            # A blank last line of a file is none.
            assert found[str(path)] == (text[:-1] if text.endswith(b"\n\n") or text == b"\n" else text)
        assert sum(piece.size_bytes for piece in pieces) == sum(path.stat().st_size for path in paths)


def test_pieces_are_about_as_large_as_asked(tmp_path: Path) -> None:
    write_file(tmp_path / "large.txt", [9] * 1000, ends_in_newline=True)
    for number in range(30):
        write_file(tmp_path / f"small-{number:02d}.txt", [9] * 10, ends_in_newline=True)
    files = sorted(str(path) for path in tmp_path.iterdir())
    pieces = plan_pieces(files, piece_bytes=1000)
    assert all(500 <= piece.size_bytes <= 1500 for piece in pieces[:-1])
    assert len(pieces) < 20
    assert plan_pieces(files, piece_bytes=1000) == pieces


def test_gzip_is_never_cut(tmp_path: Path) -> None:
    content = b"some line\n" * 5000
    (tmp_path / "day.gz").write_bytes(gzip.compress(content))
    (piece,) = plan_pieces([str(tmp_path / "day.gz")], piece_bytes=10)
    assert [(span.start, span.stop) for span in piece.spans] == [(0, None)]
    assert b"".join(piece.spans[0].blocks()) == content


def test_text_without_line_ends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"x" * (3 << 20))
    with pytest.raises(TextError, match=r"no line end within .* of .*blob"):
        plan_pieces([str(tmp_path / "blob")], piece_bytes=1 << 20)
