"""Manifests: a round trip, a limit for everything a hostile one may claim, and no crash on any input."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.orchestrator.commit.manifest import (
    FORMAT_VERSION,
    Manifest,
    TableFiles,
    commit_name,
    from_json,
    parse_commit_name,
    problems,
    to_json,
)
from podembed.orchestrator.commit.verification import verify
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, seal, unseal
from tests.long_tests import examples
from tests.orchestrator.commit.checkpoint_samples import write_attempt

STORE = Store("memory://manifest-samples/run")
NAME = "s000000010-g00000002"
_SAMPLE: list[Manifest] = []


def sample() -> Manifest:
    if not _SAMPLE:
        _SAMPLE.append(write_attempt(STORE, step=10, generation=2, parent="s000000008-g00000001"))
    return _SAMPLE[0]


def document() -> dict[str, Any]:
    return unseal("x", to_json(sample()))


def test_a_manifest_comes_back() -> None:
    assert from_json(NAME, to_json(sample())) == sample()
    assert to_json(from_json(NAME, to_json(sample()))) == to_json(sample())


def test_it_knows_all_its_files() -> None:
    assert sample().file_sizes() == STORE.sizes(f"data/{NAME}")
    assert sample().name == NAME
    assert sample().size_bytes == sum(
        size for name, size in sample().file_sizes().items() if not name.endswith("zarr.json")
    )


@given(st.integers(0, 10**17), st.integers(1, 10**11))
def test_names_of_commits_parse(step: int, generation: int) -> None:
    assert parse_commit_name(commit_name(step=step, generation=generation)) == (step, generation)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s1-g1",
        "s0000000010-g00000001",
        "s000000010-g00000001.json",
        "s000000010-g-0000001",
        "../x",
        "s00000001٣-g00000001",
    ],
)
def test_other_texts_are_no_names_of_commits(text: str) -> None:
    assert parse_commit_name(text) is None


def test_a_changed_byte_is_found() -> None:
    good = to_json(sample())
    for at in random.Random(0).sample(range(len(good)), 300):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        with pytest.raises(DocumentRefused):
            from_json(NAME, bytes(bad))


def test_a_manifest_under_another_name_is_refused() -> None:
    with pytest.raises(DocumentRefused, match=NAME):
        from_json("s000000011-g00000002", to_json(sample()))


def test_another_format_is_refused_with_advice() -> None:
    with pytest.raises(DocumentRefused, match="matching version of podembed"):
        from_json(NAME, seal(document() | {"format_version": 5}))


def nested(manifest: Manifest) -> Manifest:
    """The same with its files where versions before 4 had them."""
    return dataclasses.replace(manifest, tables=tuple(map(_nested, manifest.tables)))


def _nested(table: TableFiles) -> TableFiles:
    chunks = tuple(
        dataclasses.replace(chunk, name=re.sub(r"/c\.(\d+)\.0\.0$", r"/c/\1/0/0", chunk.name)) for chunk in table.chunks
    )
    return dataclasses.replace(table, separator="/", chunks=chunks)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_formats_before_are_read_and_written_as_they_were(version: int) -> None:
    """Two have lists, version 1 does not say that its files have one bucket each, and none says where files lie."""
    before = dataclasses.replace(nested(sample()), format_version=version)
    old = unseal("x", to_json(before))
    if version < 3:
        files = [f"data/{NAME}/tables/users/rows/c/{bucket}/0/0" for bucket in range(4)]
        assert old["tables"][0]["chunks"]["rows"]["name"] == files
        assert [len(digest) for digest in old["tables"][0]["digests"]] == [32] * 4
        assert old["placement"]["users"] == [0, 1, 0, 1]
    assert [table.get("buckets_per_file") for table in old["tables"]] == [None if version == 1 else 1] * 2
    assert not any("separator" in table for table in old["tables"])
    read = from_json(NAME, seal(old))
    assert read == before
    assert to_json(read) == seal(old)
    # What a delta to it becomes today: its files stay where they are.
    today = dataclasses.replace(read, format_version=FORMAT_VERSION)
    assert from_json(NAME, to_json(today)) == today
    assert {table["separator"] for table in unseal("x", to_json(today))["tables"]} == {"/"}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_formats_before_cannot_say_where_files_lie(version: int) -> None:
    with pytest.raises(DocumentRefused, match=f"separator '.' in version {version}"):
        to_json(dataclasses.replace(sample(), format_version=version))
    old = unseal("x", to_json(dataclasses.replace(nested(sample()), format_version=version)))
    old["tables"][0]["separator"] = "/"
    with pytest.raises(DocumentRefused, match=f"member 'separator' in version {version}"):
        from_json(NAME, seal(old))


@pytest.mark.parametrize("separator", ["", "_", "/.", 1, None])
def test_another_separator_is_refused(separator: Any) -> None:
    spoilt = document()
    spoilt["tables"][0]["separator"] = separator
    with pytest.raises(DocumentRefused, match="separator"):
        from_json(NAME, seal(spoilt))


def test_a_commit_may_come_before_the_first_step(tmp_path: Path) -> None:
    assert problems(write_attempt(Store(tmp_path / "run"), step=0, generation=1, parent=None)) == []


def test_todays_format_says_how_many_buckets_a_file_has() -> None:
    missing = document()
    del missing["tables"][0]["buckets_per_file"]
    with pytest.raises(DocumentRefused, match="buckets_per_file"):
        from_json(NAME, seal(missing))


def test_the_format_before_cannot_tell_of_several_buckets_a_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    old = dataclasses.replace(
        write_attempt(store, step=10, generation=2, parent=None, buckets_per_file=2), format_version=1
    )
    assert any("2 buckets a file in version 1" in problem for problem in problems(old))
    with pytest.raises(DocumentRefused, match="2 buckets a file in version 1"):
        to_json(old)


def change(path: str, value: object) -> bytes:
    """The sample with one member replaced, sealed again as an attacker would."""
    changed = document()
    at: Any = changed
    *parents, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    for key in parents:
        at = at[key]
    at[last] = value
    return seal(changed)


LONG = "x" * 5000
OTHER = "data/s000000010-g00000002/other"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("step", -1),
        ("step", 11),
        ("step", 10.0),
        ("step", 10**18),
        ("generation", 0),
        ("hosts", 0),
        ("run_id", ""),
        ("run_id", LONG),
        ("parent", "../../etc"),
        ("parent", NAME),
        ("parent", "s000000011-g00000001"),
        ("parent", "s000000008-g00000003"),
        ("created_unix_s", "now"),
        ("unknown", 1),
        ("tables", {}),
        ("tables", [None]),
        ("tables.0.name", ""),
        ("tables.0.name", "users\x1b[31m"),
        ("tables.0.name", "items"),
        ("tables.0.num_rows", -1),
        ("tables.0.num_rows", 2**62),
        ("tables.0.num_rows", 33 * 4),
        ("tables.0.dim", 4),
        ("tables.0.num_buckets", 3),
        ("tables.0.num_buckets", 0),
        ("tables.0.num_buckets", 2**40),
        ("tables.0.rows_per_bucket", 2**40),
        ("tables.0.arrays", []),
        ("tables.0.arrays.0.name", "accumulator"),
        ("tables.0.arrays.1.name", "rows"),
        ("tables.0.arrays.1.name", 7),
        ("tables.0.arrays.1.width", 2**50),
        ("tables.0.arrays.1.width", 0),
        ("tables.0.arrays.0.dtype", "object"),
        ("tables.0.arrays.0.dtype", "float64"),
        ("tables.0.arrays.0.path", "/etc"),
        ("tables.0.arrays.0.path", "data/../x"),
        ("tables.0.arrays.0.path", "commit/x"),
        ("tables.0.arrays.0.path", "data/not-an-attempt/x"),
        ("tables.0.arrays.0.metadata_size_bytes", 2**40),
        ("tables.0.arrays.0.metadata_crc32c", 2**32),
        ("tables.0.digests", []),
        ("tables.0.digests", ["0" * 32] * 4),
        ("tables.0.digests", ""),
        ("tables.0.digests", "A" * 64),
        ("tables.0.digests", "G" * 85 + "é"),
        # One bit of the last digit that belongs to no byte.
        ("tables.0.digests", "A" * 85 + "B=="),
        ("tables.0.buckets_per_file", 0),
        ("tables.0.buckets_per_file", 2),
        ("tables.0.buckets_per_file", 2**30),
        ("tables.0.buckets_per_file", True),
        ("tables.0.buckets_per_file", "1"),
        ("format_version", True),
        ("format_version", 1),
        ("tables.0.chunks", []),
        ("tables.0.chunks", {}),
        ("tables.0.chunks.rows", {}),
        ("tables.0.chunks.rows.name", []),
        ("tables.0.chunks.rows.size_bytes", 2**60),
        ("tables.0.chunks.rows.size_bytes", -4),
        ("tables.0.chunks.rows.size_bytes", True),
        ("tables.0.chunks.rows.crc32c", None),
        ("tables.0.chunks.rows.crc32c", [1, 2, 3, 4]),
        ("tables.0.chunks.rows.crc32c", "AAAA"),
        ("tables.0.chunks.rows.crc32c", "AAAAAA=="),
        ("tables.0.chunks.extra", {"size_bytes": 0, "crc32c": ""}),
        ("dense.0.key", "count"),
        ("dense.0.key", LONG),
        ("dense.0.shape", [2**40, 2**40]),
        ("dense.0.shape", [-2, 3]),
        ("dense.0.shape", [1] * 17),
        ("dense.0.dtype", "O"),
        ("dense.0.size_bytes", 0),
        ("dense.0.path", "data/x"),
        ("dense.0.path", f"{OTHER}/../../x"),
        ("dense.1.path", "data/s000000010-g00000002/dense/w"),
        ("placement", {}),
        ("placement", []),
        ("placement.users", [0, 1]),
        ("placement.users", "AAAAAA=="),
        ("placement.users", "AAAAAAAAAAACAAAAAAAAAA=="),
        ("placement.users", "AAAAAAAAAAD/////AAAAAA=="),
        ("counters", {"a": "b"}),
        ("cursor", {LONG: 1}),
        ("versions", {"a": LONG}),
        ("versions", {"a": None}),
    ],
)
def test_a_manifest_that_claims_nonsense_is_refused_even_with_a_good_seal(path: str, value: object) -> None:
    with pytest.raises(DocumentRefused):
        from_json(NAME, change(path, value))


def test_many_arrays_of_many_buckets_cost_nothing() -> None:
    """2^20 buckets × 500 arrays would be 5·10^8 entries to expect; counting comes first."""
    changed = document()
    table = changed["tables"][0]
    table["num_buckets"], table["rows_per_bucket"] = 2**20, 1
    table["arrays"] = [table["arrays"][0] | {"name": "rows" if n == 0 else f"a{n}"} for n in range(500)]
    table["chunks"] = {array["name"]: {"size_bytes": 1, "crc32c": ""} for array in table["arrays"]}
    with pytest.raises(DocumentRefused):
        from_json(NAME, seal(changed))


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_any_mutation_is_refused_or_harmless(data) -> None:
    """Replaces random members of a sealed manifest; whatever is accepted names only files of its run, with their true
    sizes.
    """
    changed = document()
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = changed
        while isinstance(at, dict | list) and at:
            key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.integers(0, 4)) == 0:
                at[key] = data.draw(
                    st.none()
                    | st.integers(-3, 40)
                    | st.integers()
                    | st.text(max_size=6)
                    | st.just([])
                    | st.just({})
                    | st.floats()
                )
                break
            at = at[key]
    try:
        sealed = seal(changed)
        manifest = from_json(NAME, sealed)
    except (DocumentRefused, ValueError):
        return
    assert problems(manifest) == []
    assert all(name.startswith("data/s") for name in manifest.file_sizes())
    report = verify(STORE, manifest)
    assert report.num_bytes < 10_000


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(DocumentRefused):
        from_json(NAME, data)


@pytest.mark.parametrize("text", ["[" * 10_000, '{"a":' * 10_000, '{"step":NaN}', "\x80\x04\x95", '{"__reduce__":1}'])
def test_hostile_json_is_refused(text: str) -> None:
    with pytest.raises(DocumentRefused):
        from_json(NAME, text.encode())


class TestCoverage:
    """A manifest cannot be written unless every bucket of every array is there once."""

    def replace_chunks(self, chunks: Any) -> Manifest:
        users, *others = sample().tables
        return dataclasses.replace(sample(), tables=(dataclasses.replace(users, chunks=tuple(chunks)), *others))

    def test_a_missing_bucket(self) -> None:
        with pytest.raises(DocumentRefused, match="7 chunks for 2 arrays in 4 buckets"):
            to_json(self.replace_chunks(sample().tables[0].chunks[1:]))

    def test_a_double_bucket(self) -> None:
        first, _, *rest = sample().tables[0].chunks
        with pytest.raises(DocumentRefused, match=r"without \[\('rows', 1\)\] and with \[\('rows', 0\)\]"):
            to_json(self.replace_chunks([first, first, *rest]))

    def test_an_unknown_array(self) -> None:
        first, *rest = sample().tables[0].chunks
        with pytest.raises(DocumentRefused, match="unknown"):
            to_json(self.replace_chunks([dataclasses.replace(first, array="other"), *rest]))

    def test_one_file_for_two_buckets(self) -> None:
        first, second, *rest = sample().tables[0].chunks
        with pytest.raises(DocumentRefused, match="several entries"):
            to_json(self.replace_chunks([first, dataclasses.replace(second, name=first.name), *rest]))

    def test_a_file_in_another_place(self) -> None:
        first, *rest = sample().tables[0].chunks
        moved = self.replace_chunks([dataclasses.replace(first, name=f"{OTHER}/c.0.0.0"), *rest])
        with pytest.raises(DocumentRefused, match="do not lie where their arrays do"):
            to_json(moved)
        # Version 2 named each file.
        before = dataclasses.replace(nested(moved), format_version=2)
        assert from_json(NAME, to_json(before)) == before


def test_a_stranger_can_check_the_seal() -> None:
    import hashlib

    data = to_json(sample())
    body, digest = data[: -len(',"sha256":""}\n') - 64], data[-64 - len('"}\n') : -len('"}\n')]
    assert hashlib.sha256(body + b"}").hexdigest().encode() == digest
    assert json.loads(data)["step"] == 10


def test_reading_names_of_other_runs_never_leaves_the_store() -> None:
    with pytest.raises(StorageError):
        STORE.read("../manifest-samples/other", max_bytes=1)
