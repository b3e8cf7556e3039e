"""Single rows of a commit: the right values, from the fewest files, and no others."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.run.reference import CommittedState, open_commit, split_reference
from podembed.serving.committed_rows import row_batches
from podembed.tools.inspect.extract import extract, render
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.storage.store import Store
from tests.long_tests import examples
from tests.orchestrator.committed_tables import create_run, flip_byte, run_with, two_tables

TABLES = two_tables()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> CommittedState:
    store, _ = run_with(tmp_path_factory.mktemp("extract") / "run", TABLES, 10)
    return open_commit(store.location)


class Watching(Store):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.opened: list[str] = []

    def read_into(self, name, buffers, **where) -> None:
        self.opened.append(name)
        super().read_into(name, buffers, **where)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 36), min_size=1, max_size=12), with_slots=st.booleans())
def test_rows_are_those_of_the_table_in_the_order_asked_for(state, ids: list[int], with_slots: bool) -> None:
    found = extract(state, "users", ids, with_slots=with_slots)
    arrays = TABLES["users"].arrays
    assert [*found.values] == ([*arrays] if with_slots else ["rows"])
    for name, values in found.values.items():
        np.testing.assert_array_equal(values, arrays[name][ids])


def test_only_the_buckets_that_are_needed_are_read(state: CommittedState) -> None:
    store = Watching(state.store.location)
    watched = dataclasses.replace(state, store=store)
    extract(watched, "users", [2, 6, 34, 3], with_slots=False)
    assert [name.split("users/")[1] for name in store.opened] == ["rows/c.2.0.0", "rows/c.3.0.0"]
    store.opened.clear()
    extract(watched, "users", [5])
    assert [name.split("users/")[1] for name in store.opened] == ["rows/c.1.0.0", "accumulator/c.1.0.0"]


@pytest.mark.parametrize("ids", [[37], [-1], [0, 40, 5], [2**70]])
def test_ids_outside_the_table_are_refused(state: CommittedState, ids: list[int]) -> None:
    with pytest.raises(ConfigurationError, match=r"Found row numbers .* Expected 0 to 36"):
        extract(state, "users", ids)


def test_many_wrong_ids_are_counted(state: CommittedState) -> None:
    with pytest.raises(ConfigurationError, match="100, 101, 102, 103, 104 and 15 more"):
        extract(state, "users", range(100, 120))


def test_the_text_gives_back_the_same_bits(state: CommittedState) -> None:
    lines = render(extract(state, "users", [30, 7])).splitlines()
    assert [lines[0], lines[3]] == ["users[30]", "users[7]"]
    for line, name, row in ((lines[1], "rows", 30), (lines[2], "accumulator", 30), (lines[4], "rows", 7)):
        label, *numbers = line.split()
        assert label == name
        np.testing.assert_array_equal(np.array(numbers, np.float32), TABLES["users"].arrays[name][row])


def test_damage_is_found_in_the_buckets_that_are_read(tmp_path: Path) -> None:
    store, (manifest,) = run_with(tmp_path / "run", TABLES, 10)
    flip_byte(store.locate(manifest.tables[0].chunks[1].name))
    state = open_commit(store.location)
    extract(state, "users", [0, 2, 3])
    with pytest.raises(ChunkDamaged, match="rows/c.1."):
        extract(state, "users", [1])


class TestReferences:
    def test_what_is_not_there_is_refused(self, state: CommittedState, tmp_path: Path) -> None:
        url = state.store.location
        with pytest.raises(ConfigurationError, match="Found no run in"):
            open_commit(str(tmp_path))
        with pytest.raises(ConfigurationError, match=r"RUN@COMMIT"):
            open_commit(f"{url}@latest")
        with pytest.raises(ConfigurationError, match=state.manifest.name):
            open_commit(f"{url}@s000000011-g00000001")
        with pytest.raises(ConfigurationError, match="Found no commit 'newest'"):
            open_commit(url, commit="newest")
        with pytest.raises(ConfigurationError, match="Found two commits"):
            open_commit(f"{url}@{state.manifest.name}", commit="s000000011-g00000001")

    def test_a_run_without_commits_is_refused(self, tmp_path: Path) -> None:
        store, _ = create_run(tmp_path / "run", TABLES)
        with pytest.raises(ConfigurationError, match="Found no commit in"):
            open_commit(store.location)

    def test_a_lost_record_keeps_nobody_from_the_tables(self, tmp_path: Path) -> None:
        store, (manifest,) = run_with(tmp_path / "run", TABLES, 10)
        store.delete("RUN.json")
        assert open_commit(store.location).manifest == manifest

    def test_folders_may_have_an_at_sign(self) -> None:
        name = "s000000010-g00000001"
        assert split_reference(f"gs://me@home/run@{name}") == ("gs://me@home/run", name)
        assert split_reference("runs/me@home") == ("runs/me@home", None)


def test_a_manifest_of_another_run_and_a_forged_description_are_refused(tmp_path: Path) -> None:
    """Each in a run that is sound otherwise, whose other readers look at the manifest alone."""
    tables = two_tables()
    store, manifests = run_with(tmp_path / "run", tables, 10)
    other, others = run_with(tmp_path / "other", tables, 20, run_id="run-2")
    shutil.copy(other.locate(f"commit/{others[0].name}.json"), store.locate(f"commit/{others[0].name}.json"))
    shutil.copytree(other.locate(f"data/{others[0].name}"), store.locate(f"data/{others[0].name}"))
    with pytest.raises(ConfigurationError, match="of run run-2.*Expected run run-1"):
        open_commit(store.location)
    with pytest.raises(ConfigurationError, match="of run run-2.*Expected run run-1"):
        open_commit(f"{store.location}@{others[0].name}")
    # Without a record nobody can tell, and tables may be rescued.
    store.delete("RUN.json")
    assert open_commit(store.location).manifest == others[0]
    state = open_commit(f"{store.location}@{manifests[0].name}")
    described = f"{state.table('users').arrays[0].path}/zarr.json"
    forged = store.read(described, max_bytes=1 << 16).replace(b'"float32"', b'"uint8  "')
    store.replace(described, forged)
    with pytest.raises(ChunkDamaged, match=described):
        extract(state, "users", [3])
    with pytest.raises(ChunkDamaged, match=described):
        next(row_batches(store, state.table("users"), state.table("users").arrays[0]))
