"""The folder of compiled programs: what lies there is run, so only a folder of this user alone is used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from podembed.workers.device.compile_cache import every_member_writes, use_compile_cache
from tests.processes import free_port

ROOT = Path(__file__).parents[3]
PATIENCE_S = 900.0


@pytest.fixture(autouse=True)
def no_cache() -> Iterator[None]:
    """None is set at first, also where tests of this process share one."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is set, without setting it."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", seen.__setitem__)
    return seen


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = tmp_path / "compiled"
    assert use_compile_cache(str(folder))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert use_compile_cache(str(folder)), "it may be there already"
    assert settings["jax_compilation_cache_dir"] == str(folder)


@pytest.mark.parametrize("kind", ["open", "link", "missing", "file", "replaceable"])
def test_any_other_folder_is_left_unused(kind: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = tmp_path / "compiled"
    match kind:
        case "open":
            folder.mkdir()
            folder.chmod(0o770)
        case "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        case "missing":
            folder = tmp_path / "no session" / "compiled"
        case "file":
            folder.write_bytes(b"")
        case "replaceable":
            # Others could put a folder of theirs in its place.
            for parent in (shared := Path(tempfile.mkdtemp(dir="/tmp")), shared / "between"):
                parent.mkdir(exist_ok=True)
                parent.chmod(0o777)
            folder = shared / "between" / "compiled"
    try:
        assert not use_compile_cache(str(folder))
    finally:
        if kind == "replaceable":
            shutil.rmtree(folder.parents[1])
    assert settings == {}


def test_a_cache_of_the_user_stays(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", "/somewhere")
    assert use_compile_cache(str(tmp_path / "compiled"))
    assert jax.config.jax_compilation_cache_dir == "/somewhere"  # type: ignore[attr-defined]
    assert not (tmp_path / "compiled").exists()


def test_members_of_the_next_gang_find_what_those_of_the_last_one_compiled(tmp_path: Path, small_data: str) -> None:
    """All of them: JAX alone keeps the programs of the first member, and the others never find those."""
    cache = tmp_path / "compiled"
    cache.mkdir(mode=0o700)
    arguments = [str(cache), small_data, f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.workers.device.compile_cache_process"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    members = [
        subprocess.Popen([*command, str(process), *arguments], env=environment, cwd=ROOT, **pipes)
        for process in range(2)
    ]
    try:
        said = [member.communicate(timeout=PATIENCE_S) for member in members]
    finally:
        for member in members:
            member.kill()
    for process, (out, err) in enumerate(said):
        gangs = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert len(gangs) == 2, err
        first, second = gangs
        assert first["number"] == second["number"] == process
        assert (first["asked"], first["known"]) == (2, 0)
        assert (second["asked"], second["known"]) == (2, 2)


TORN = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from podembed.workers.device.compile_cache import every_member_writes, use_compile_cache
assert use_compile_cache(sys.argv[1])
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rsplit("/", 1)[1]))
def times_two(x):
    return 2 * jnp.sin(x)
def compiled():
    jax.clear_caches()
    events.clear()
    with every_member_writes(sys.argv[1]):
        jax.jit(times_two)(jnp.ones(8))
    return sorted((file.name.split("-")[0], file.stat().st_size) for file in Path(sys.argv[1]).iterdir())
whole = compiled()
(program,) = Path(sys.argv[1]).glob("jit_times_two-*")
with open(program, "r+b") as file:
    file.truncate(int(sys.argv[2]))
names = [name for name, _ in compiled()]
assert "jit_times_two" not in names and len(names) == len(whole) - 1, names
assert [name for name, _ in compiled()] == [name for name, _ in whole]
compiled()
assert events.count("cache_hits") == events.count("compile_requests_use_cache") > 0, events
"""


@pytest.mark.parametrize("size", [0, 700])
def test_a_program_that_a_killed_process_left_half_written_is_written_anew(size: int, tmp_path: Path) -> None:
    """JAX leaves it where it is and compiles at every start."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TORN, str(tmp_path / "compiled"), str(size)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Error reading persistent compilation cache entry" in done.stderr, "nobody is kept from knowing"


def test_the_cache_of_a_user_is_written_as_jax_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may lie on a storage that all share."""
    from jax._src.distributed import global_state

    monkeypatch.setattr(global_state, "process_id", 3)
    jax.config.update("jax_compilation_cache_dir", "/somewhere")
    try:
        for folder, expected in (("/somewhere", 0), (str(tmp_path), 3), ("", 3)):
            with every_member_writes(folder):
                assert global_state.process_id == expected
            assert global_state.process_id == 3
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
