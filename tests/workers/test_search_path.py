"""Where a worker looks for modules: in its driver's folders, without losing its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from podembed.workers.search_path import SearchPath, missing_modules, search_as


def test_folders_of_the_driver_are_searched_where_the_driver_searches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, last, gone = (str(tmp_path / name) for name in ("first", "second", "last", "gone"))
    for folder in (first, second, last):
        Path(folder).mkdir()
    own = ["/lib", f"{second}/"]
    monkeypatch.setattr(sys, "path", own.copy())
    path = SearchPath(before=(first, second), after=(last, gone))
    for _ in range(2):
        # What is searched already stays where it is, and a machine may lack a folder.
        search_as(path)
        assert sys.path == [first, *own, last]


def test_packages_that_are_not_found_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far_away_model.py").write_text("raise RuntimeError('it is looked for, not imported')")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    packages = ("numpy", "far_away_model", "nowhere_at_all")
    assert missing_modules(SearchPath(), packages) == ["far_away_model", "nowhere_at_all"]
    assert missing_modules(SearchPath(after=(str(tmp_path),)), packages) == ["nowhere_at_all"]
