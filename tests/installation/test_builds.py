"""A wheel has all of the program and nothing else, from a checkout with links or without, and from a source archive."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.architecture.test_imports import MODULES, ROOT, label
from tests.installation.builds import build_source_archive, build_wheel, copy_checkout
from tests.long_tests import long_case


@pytest.mark.parametrize("is_archived", [long_case(False, id="checkout"), pytest.param(True, id="archive")])
@pytest.mark.parametrize("with_links", [True, False], ids=["links", "no-links"])
def test_a_wheel_has_every_module_under_one_name(tmp_path: Path, with_links: bool, is_archived: bool) -> None:
    checkout = copy_checkout(tmp_path / "checkout", with_links=with_links)
    wheel = build_wheel(build_source_archive(checkout) if is_archived else checkout)
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
        (entries,) = [opened.read(name).decode() for name in opened.namelist() if name.endswith("entry_points.txt")]
    own = {f"podembed/{path.name}" for path in (ROOT / "podembed").glob("*.py")} | {"podembed/py.typed"}
    own |= {f"podembed/docs/{path.name}" for path in (ROOT / "docs").iterdir() if path.is_file()}
    assert names == own | {f"podembed/{label(path)}" for path in MODULES}
    assert entries.split() == ["[console_scripts]", "podembed", "=", "podembed.jobs.cli.main:main"]
