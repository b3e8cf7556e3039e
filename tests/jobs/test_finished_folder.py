from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from podembed.jobs.finished_folder import REPORT_NAME, FolderError, create_once, read_report


def write_two(folder: Path) -> dict[str, Any]:
    (folder / "a.txt").write_text("one")
    (folder / "b.txt").write_text("three")
    return {"lines": 2}


def refuse(folder: Path) -> dict[str, Any]:
    raise AssertionError(f"{folder} should not be written again")


def test_a_folder_is_written_once_and_then_found(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "set"
    assert read_report(folder) is None
    report = create_once(folder, write_two)
    assert report == {"lines": 2, "file_bytes": {"a.txt": 3, "b.txt": 5}}
    assert create_once(folder, refuse) == report
    assert sorted(path.name for path in folder.parent.iterdir()) == ["set"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    assert create_once(tmp_path, write_two)["lines"] == 2


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        write_two(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        create_once(tmp_path / "set", fail)
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_one_wins_and_both_get_its_folder(tmp_path: Path) -> None:
    both_write = threading.Barrier(2, timeout=120)
    reports = []

    def write(folder: Path, number: int) -> dict[str, Any]:
        (folder / "who.txt").write_text(str(number))
        both_write.wait()
        return {"number": number}

    threads = [
        threading.Thread(target=lambda n=n: reports.append(create_once(tmp_path / "set", lambda f: write(f, n))))
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(reports) == 2
    assert reports[0] == reports[1]
    assert (tmp_path / "set" / "who.txt").read_text() == str(reports[0]["number"])
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"file_bytes": 3}', '{"file_bytes": {"a.txt": "x"}}'])
def test_a_folder_without_a_readable_report_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text("somebody's")
    with pytest.raises(FolderError, match=r"without a readable COMPLETE\.json"):
        create_once(tmp_path, refuse)
    (tmp_path / REPORT_NAME).write_text(content)
    with pytest.raises(FolderError, match=r"without a readable COMPLETE\.json"):
        read_report(tmp_path)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").write_text("a file")
    with pytest.raises(FolderError, match="Found a file in the place of the folder"):
        create_once(tmp_path / "set", refuse)


def test_missing_or_cut_files_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    create_once(folder, write_two)
    (folder / "b.txt").write_text("thre")
    with pytest.raises(FolderError, match=r"b.txt with 4 bytes. Expected 5"):
        create_once(folder, refuse)
    (folder / "b.txt").unlink()
    with pytest.raises(FolderError, match=r"b.txt with None bytes"):
        read_report(folder)


@pytest.mark.parametrize("call", ["iterdir", "is_dir", "read_text"])
def test_a_folder_that_may_not_be_read_is_told_with_its_remedy(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage's answer is made up: the user of the tests may be one who may read everything."""
    create_once(tmp_path / "set", write_two)

    def refused(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, call, refused)
    with pytest.raises(FolderError, match="may not be read .Permission denied: .*Give that user the right to"):
        read_report(tmp_path / "set")


def test_a_place_where_no_folder_can_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="none can be made there .(File exists|Not a directory).*Expected a place"):
        create_once(tmp_path / "file" / "deep" / "set", write_two)
