"""Where the tables of a new run come from, and that they arrive whatever the two numbers of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from embedding.config import TableConfig
from embedding.optimizers import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from embedding.table_spec import TableSpec
from orchestrator.config import ConfigurationError
from orchestrator.manifest import Manifest
from orchestrator.warm_start import (
    RuleKind,
    TableRule,
    WarmStartRefused,
    parse_rules,
    plan_warm_start,
    read_buckets,
)
from tests.orchestrator.committed_tables import SampleTable, flip_byte, random_table, run_with
from tests.run_state import tables_of
from workers.chunks import ChunkDamaged
from workers.digest import rows_in_bucket
from workers.storage import Store

NUM_ROWS, DIM = 37, 3


def adagrad_table(seed: int, num_buckets: int = 4) -> SampleTable:
    """As a run with Adagrad would leave it."""
    spec = spec_of("any", optimizer=Adagrad(0.1))
    return random_table(seed, num_rows=NUM_ROWS, num_buckets=num_buckets, widths=spec.widths)


def spec_of(
    name: str, *, num_rows: int = NUM_ROWS, dim: int = DIM, optimizer: Optimizer | None = None, num_buckets: int = 2
) -> TableSpec:
    config = TableConfig(num_rows, dim, name=name, optimizer=optimizer or Adagrad(0.5))
    return TableSpec.of(config, seed=1, num_buckets=num_buckets)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Manifest]:
    tables = {"users": adagrad_table(1), "items": adagrad_table(2)}
    store, (manifest,) = run_with(tmp_path_factory.mktemp("warm") / "run", tables, 10)
    return store, manifest


def refused(manifest: Manifest, specs: Sequence[TableSpec], *rules: str) -> tuple[str, ...]:
    with pytest.raises(WarmStartRefused) as caught:
        plan_warm_start(manifest, specs, parse_rules(rules))
    assert "Expected the same tables, or a rule" in str(caught.value)
    for difference in caught.value.differences:
        assert difference in str(caught.value)
    return caught.value.differences


class TestPlan:
    def test_the_same_tables_need_no_rules(self, source) -> None:
        """Another learning rate and another number of buckets are no differences."""
        _, manifest = source
        plan = plan_warm_start(manifest, [spec_of("items", num_buckets=8), spec_of("users")])
        assert (plan.run_id, plan.commit, plan.left_behind) == ("run-1", manifest.name, ())
        assert [(start.table, start.num_buckets) for start in plan.tables] == [("items", 8), ("users", 2)]
        assert [start.source for start in plan.tables] == [manifest.tables[1], manifest.tables[0]]
        assert "4 -> 8" in plan.describe()

    def test_rules_say_what_is_meant(self, source) -> None:
        _, manifest = source
        specs = [spec_of("members"), spec_of("ads", dim=5, optimizer=SGD(0.1))]
        plan = plan_warm_start(manifest, specs, parse_rules(["members=rename=users", "ads=reinit", "items=drop"]))
        assert [start.source and start.source.name for start in plan.tables] == ["users", None]
        assert plan.left_behind == ("items",)
        assert "initial values" in plan.describe()
        assert "items (left behind)" in plan.describe()

    def test_two_tables_may_change_their_names_with_each_other(self, source) -> None:
        _, manifest = source
        rules = parse_rules(["users=rename=items", "items=rename=users"])
        plan = plan_warm_start(manifest, [spec_of("users"), spec_of("items")], rules)
        assert [start.source and start.source.name for start in plan.tables] == ["items", "users"]

    def test_a_table_that_begins_anew_leaves_the_old_one_behind(self, source) -> None:
        _, manifest = source
        plan = plan_warm_start(manifest, [spec_of("users", dim=9), spec_of("items")], parse_rules(["users=reinit"]))
        assert plan.tables[0].source is None
        assert plan.left_behind == ("users",)

    def test_all_differences_are_told_at_once(self, source) -> None:
        _, manifest = source
        differences = refused(manifest, [spec_of("users", num_rows=40, dim=4), spec_of("ads")], "ads=same", "item=drop")
        assert [difference.split(" (")[0] for difference in differences] == [
            "table 'users' has 40 rows, in the commit 37",
            "table 'users' has dimension 4, in the commit 3",
            "table 'ads' is not in the commit",
            "table 'items' of the commit is not in the job",
            "the rule item=drop names no table of the commit",
        ]

    @pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.1), RowWiseAdagrad(0.1)])
    def test_another_optimizer_is_a_difference(self, source, optimizer: Optimizer) -> None:
        _, manifest = source
        (difference,) = refused(manifest, [spec_of("users", optimizer=optimizer), spec_of("items")])
        assert difference.startswith("table 'users' has an optimizer with slots")
        assert f"in the commit accumulator ({DIM})" in difference

    @pytest.mark.parametrize(
        ("rules", "expected"),
        [
            (["users=drop"], "table 'users' is in the job, but its rule is drop"),
            (["users=rename=nobody"], "loaded from 'nobody', which the commit does not have"),
            (["users=rename=items", "items=drop"], "loaded from 'items', whose rule is drop"),
            (["ads=reinit"], "a rule for 'ads' names no table of the job"),
        ],
    )
    def test_rules_that_fit_nothing_are_differences(self, source, rules: list[str], expected: str) -> None:
        _, manifest = source
        assert any(expected in found for found in refused(manifest, [spec_of("users"), spec_of("items")], *rules))

    def test_a_rule_without_its_source_is_refused(self, source) -> None:
        _, manifest = source
        with pytest.raises(WarmStartRefused, match="is rename with source None"):
            plan_warm_start(manifest, [spec_of("users"), spec_of("items")], {"users": TableRule(kind=RuleKind.RENAME)})

    def test_other_element_types_are_a_difference(self, tmp_path: Path) -> None:
        values = {name: array.astype(np.float16) for name, array in adagrad_table(1).arrays.items()}
        _, (manifest,) = run_with(tmp_path / "run", {"users": SampleTable(num_buckets=1, arrays=values)}, 10)
        (difference,) = refused(manifest, [spec_of("users")])
        assert "partly float16" in difference


class TestRules:
    def test_words(self) -> None:
        rules = parse_rules(["a=same", "b=reinit", "c=drop", "d=rename=e=f"])
        assert [rule.kind for rule in rules.values()] == [
            RuleKind.SAME,
            RuleKind.REINIT,
            RuleKind.DROP,
            RuleKind.RENAME,
        ]
        assert rules["d"].source == "e=f"

    @pytest.mark.parametrize(
        "text", ["", "a", "a=", "=drop", "a=other", "a=rename", "a=rename=", "a=drop=b", "a=drop="]
    )
    def test_other_forms_are_refused(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match="Expected TABLE=same"):
            parse_rules([text])

    def test_two_rules_for_a_table_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="two rules for table 'a'"):
            parse_rules(["a=same", "a=drop"])


class Counting(Store):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.opened: list[str] = []

    def read_into(self, name, buffers) -> None:
        self.opened.append(name)
        super().read_into(name, buffers)


class TestReading:
    @pytest.mark.parametrize("cut_by", [1, 2, 4, 16, 64])
    @pytest.mark.parametrize("num_hosts", [1, 3])
    def test_every_row_and_slot_arrives(self, source, cut_by: int, num_hosts: int) -> None:
        store, manifest = source
        files = manifest.tables[0]
        expected = tables_of(store, manifest)
        rows_per_bucket = -(-NUM_ROWS // cut_by)
        found = {array.name: np.full((NUM_ROWS, array.width), -1, np.float32) for array in files.arrays}
        for host in range(num_hosts):
            mine = range(host, cut_by, num_hosts)
            out = {
                bucket: [np.full((rows_per_bucket, array.width), -7, np.float32) for array in files.arrays]
                for bucket in mine
            }
            counting = Counting(store.location)
            read_buckets(counting, files, num_buckets=cut_by, out=out)
            assert len(counting.opened) == len(set(counting.opened)), "each file once"
            for bucket, arrays in out.items():
                filled = rows_in_bucket(num_rows=NUM_ROWS, num_buckets=cut_by, bucket=bucket)
                for array, values in zip(files.arrays, arrays, strict=True):
                    found[array.name][bucket::cut_by] = values[:filled]
                    assert (values[filled:] == -7).all(), "padding is not touched"
        for name, values in found.items():
            np.testing.assert_array_equal(values, expected[f"users/{name}"])

    def test_only_the_files_that_hold_the_rows_are_read(self, source) -> None:
        store, manifest = source
        counting = Counting(store.location)
        out = {5: [np.empty((-(-NUM_ROWS // 8), DIM), np.float32) for _ in range(2)]}
        read_buckets(counting, manifest.tables[0], num_buckets=8, out=out)
        assert [name.split("users/")[1] for name in counting.opened] == ["rows/c/1/0/0", "accumulator/c/1/0/0"]

    def test_damage_is_found(self, tmp_path: Path) -> None:
        store, (manifest,) = run_with(tmp_path / "run", {"users": adagrad_table(3)}, 10)
        flip_byte(store.locate(manifest.tables[0].chunks[5].name))
        out = {0: [np.empty((NUM_ROWS, DIM), np.float32) for _ in range(2)]}
        with pytest.raises(ChunkDamaged, match="accumulator/c/1/"):
            read_buckets(store, manifest.tables[0], num_buckets=1, out=out)

    @pytest.mark.parametrize(
        ("num_buckets", "bucket", "rows", "message"),
        [(3, 0, 13, "power of two"), (2, 2, 19, "below 2"), (2, 0, 18, "Found bucket 0"), (0, 0, 1, "power of two")],
    )
    def test_arrays_that_do_not_fit_are_refused(
        self, source, num_buckets: int, bucket: int, rows: int, message: str
    ) -> None:
        store, manifest = source
        out = {bucket: [np.empty((rows, DIM), np.float32) for _ in range(2)]}
        with pytest.raises(ValueError, match=message):
            read_buckets(store, manifest.tables[0], num_buckets=num_buckets, out=out)
