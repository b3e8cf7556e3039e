"""The folder of compiled programs: what lies there is run, so only a folder of this user alone is used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from podembed.workers.device.compile_cache import every_member_writes, use_compile_cache
from tests.compiled import FOLDER, compiled_in, variables
from tests.processes import free_port

# That of all tests has what other processes compiled.
WITHOUT_CACHE = {name: value for name, value in os.environ.items() if name not in variables(compiled_in(FOLDER))}
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


def test_what_nobody_read_for_a_month_goes(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = tmp_path / "compiled"
    folder.mkdir(mode=0o700)
    (folder / "below").mkdir()
    now_s = time.time()
    # (when it was read, when it was written), in days before now.
    for name, days in {"read": (1, 90), "written": (90, 1), "left": (31, 90), "below": (90, 90)}.items():
        path = folder / name
        if name != "below":
            path.write_text("")
        os.utime(path, tuple(now_s - day * 86400 for day in days))
    assert use_compile_cache(str(folder))
    assert sorted(os.listdir(folder)) == ["below", "read", "written"]


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
    environment = {**WITHOUT_CACHE, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
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
import resource, sys
from pathlib import Path
import jax, jax.numpy as jnp
from podembed.workers.device.compile_cache import use_compile_cache
use_compile_cache(sys.argv[1])
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rsplit("/", 1)[1]))
def times_two(x):
    return 2 * jnp.sin(x)
def compiled():
    jax.clear_caches()
    events.clear()
    jax.jit(times_two)(jnp.ones(8))
    return [file.name for file in Path(sys.argv[1]).iterdir()]
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (700, most))
assert compiled() == []
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
assert [name.split("-")[0] for name in compiled()].count("jit_times_two") == 1
compiled()
assert events.count("cache_hits") == events.count("compile_requests_use_cache") > 0, events
"""


@pytest.mark.parametrize("is_users", [False, True])
def test_a_program_is_there_whole_or_not_at_all(is_users: bool, tmp_path: Path) -> None:
    """What JAX leaves of one that it could not write to the end would never be written again."""
    folder = tmp_path / "compiled"
    environment = {**WITHOUT_CACHE, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    if is_users:
        environment |= variables(compiled_in(folder))
    command = [sys.executable, "-c", TORN, str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Error writing persistent compilation cache entry" in done.stderr, "nobody is kept from knowing"
    assert "Error reading" not in done.stderr


def test_a_remote_cache_is_written_as_jax_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """All members would write to it at a time."""
    from jax._src.distributed import global_state

    monkeypatch.setattr(global_state, "process_id", 3)
    for folder, expected in (("/somewhere", 0), ("gs://bucket/compiled", 3), (None, 3)):
        jax.config.update("jax_compilation_cache_dir", folder)
        with every_member_writes():
            assert global_state.process_id == expected
        assert global_state.process_id == 3
