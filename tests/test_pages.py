"""All Python code of README and docs runs as printed, unless the page marks it as a fragment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, blocks

# Pages with tests of their own, which run their blocks and look at what comes out.
ELSEWHERE = {
    "docs/from-tpuembedding.md": "tests/conformance/test_from_tpuembedding.py",
    "docs/inference.md": "tests/serving/artifact/test_export_model.py",
    "docs/optimizers.md": "tests/embedding/tf/keras/test_documented.py",
    "docs/port-a-model.md": "tests/jobs/test_port_a_model_page.py",
    "docs/sparsecore.md": "tests/tools/sparsecore/test_page.py",
    "docs/track.md": "tests/jobs/test_track_page.py",
    "docs/write-a-job.md": "tests/jobs/test_write_a_job_page.py",
}
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
WITH_CODE = [name for name in NAMES if blocks(name, fragments=True)]
HERE = [name for name in NAMES if blocks(name) and name not in ELSEWHERE and name != "README.md"]


@pytest.mark.parametrize("page", WITH_CODE)
def test_a_block_runs_or_is_marked_as_a_fragment(page: str) -> None:
    found = blocks(page, fragments=True)
    assert {block.kind for block in found} <= {"", "fragment"}
    for block in found:
        if not block.code.startswith(">>>"):
            compile(block.code, f"{page}:{block.line}", "exec")


@pytest.mark.parametrize("page", WITH_CODE)
def test_names_are_defined_above_on_the_page(page: str, tmp_path: Path) -> None:
    """Also within functions and methods, which a run may not call."""
    code = "\n".join(block.code for block in blocks(page) if not block.code.startswith(">>>"))
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "page.py"]
    done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", ELSEWHERE)
def test_a_test_elsewhere_reads_the_page(page: str) -> None:
    text = (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")
    assert Path(page).name in text
    assert "tests.pages" in text or "doctest.testfile" in text


@pytest.mark.parametrize("page", HERE)
def test_code_runs_as_printed(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in blocks(page):
        block.run(names)


@pytest.mark.ray
@pytest.mark.slow
def test_each_program_of_the_readme_runs_by_itself(tmp_path: Path) -> None:
    for number, block in enumerate(blocks("README.md")):
        program = tmp_path / f"program_{number}.py"
        program.write_text(block.code, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, program],
            cwd=tmp_path,
            # Of which a busy machine needs more than Ray's default.
            env=os.environ | {"RAY_raylet_start_wait_time_s": "600"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
    commits = tmp_path / ".runs"
    assert sum(file.stat().st_size for file in commits.rglob("*") if file.is_file()) < 2**20
