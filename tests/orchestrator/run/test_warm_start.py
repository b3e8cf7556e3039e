"""Where the tables and the dense arrays of a new run come from, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from podembed.embedding.table_spec import TableSpec
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.run.warm_start import (
    DenseRule,
    RuleKind,
    TableRule,
    WarmStartRefused,
    parse_dense_rule,
    parse_rules,
    plan_warm_start,
    refuse_hashed_growth,
)
from podembed.workers.data.columns import IdColumn
from podembed.workers.storage.store import Store
from tests.orchestrator.committed_tables import SampleTable, commit_tables, create_run, random_table, run_with
from tests.small_job import small_job

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

    def test_the_rows_alone_may_come_without_the_slots(self, source) -> None:
        """For another optimizer; from a table of the same or of another name."""
        _, manifest = source
        specs = [spec_of("users", optimizer=Adam(0.1)), spec_of("things", optimizer=SGD(0.1))]
        plan = plan_warm_start(manifest, specs, parse_rules(["users=rows", "things=rows=items"]))
        assert [(start.source and start.source.name, start.with_slots) for start in plan.tables] == [
            ("users", False),
            ("items", False),
        ]
        assert plan.left_behind == ()
        assert "items (rows alone)" in plan.describe()
        (difference,) = refused(manifest, [spec_of("users", dim=9), spec_of("items")], "users=rows")
        assert difference.startswith("table 'users' has dimension 9")

    @pytest.mark.parametrize(
        ("rule", "keys", "parts"),
        [
            (DenseRule.SAME, {"params/w", "optimizer/m"}, ("params", "state", "optimizer")),
            (DenseRule.PARAMS, {"params/w"}, ("params", "state")),
            (DenseRule.REINIT, set(), ()),
        ],
    )
    def test_the_dense_arrays(self, tmp_path: Path, rule: DenseRule, keys: set[str], parts: tuple[str, ...]) -> None:
        tables = {"users": adagrad_table(1)}
        store, lease = create_run(tmp_path / "run", tables)
        dense = {"params/w": np.ones(3, np.float32), "optimizer/m": np.ones(3, np.float32)}
        manifest = commit_tables(store, lease, 10, tables, dense=dense)
        plan = plan_warm_start(manifest, [spec_of("users")], dense=rule)
        assert {leaf.key for leaf in plan.dense} == keys
        assert plan.dense_parts == parts

    def test_other_element_types_are_a_difference(self, tmp_path: Path) -> None:
        values = {name: array.astype(np.float16) for name, array in adagrad_table(1).arrays.items()}
        _, (manifest,) = run_with(tmp_path / "run", {"users": SampleTable(num_buckets=1, arrays=values)}, 10)
        (difference,) = refused(manifest, [spec_of("users")])
        assert "partly float16" in difference


class TestRules:
    def test_words(self) -> None:
        rules = parse_rules(["a=same", "b=reinit", "c=drop", "d=rename=e=f", "g=rows", "h=rows=i"])
        assert [rule.kind for rule in rules.values()] == [
            RuleKind.SAME,
            RuleKind.REINIT,
            RuleKind.DROP,
            RuleKind.RENAME,
            RuleKind.ROWS,
            RuleKind.ROWS,
        ]
        assert [rules[table].source for table in "adgh"] == [None, "e=f", None, "i"]

    @pytest.mark.parametrize(
        "text", ["", "a", "a=", "=drop", "a=other", "a=rename", "a=rename=", "a=drop=b", "a=drop=", "a=rows="]
    )
    def test_other_forms_are_refused(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match="Expected TABLE=same"):
            parse_rules([text])

    def test_the_dense_model_has_one_of_its_own(self) -> None:
        assert parse_rules(["@dense=reinit", "a=drop"]).keys() == {"a"}
        assert parse_dense_rule(["a=reinit"]) is DenseRule.SAME
        assert [parse_dense_rule([f"@dense={rule.value}"]) for rule in DenseRule] == [*DenseRule]
        for texts in (["@dense"], ["@dense="], ["@dense=drop"], ["@dense=same", "@dense=same"]):
            with pytest.raises(ConfigurationError, match="Expected one of @dense=same"):
                parse_dense_rule(texts)

    def test_two_rules_for_a_table_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="two rules for table 'a'"):
            parse_rules(["a=same", "a=drop"])


def test_a_table_may_grow_and_not_shrink(source: tuple[Store, Manifest]) -> None:
    _, manifest = source
    grown = spec_of("users", num_rows=NUM_ROWS + 5, num_buckets=8)
    found = plan_warm_start(manifest, [grown, spec_of("items")], parse_rules(["users=grow"]))
    assert [(start.num_rows, start.num_buckets) for start in found.tables] == [(NUM_ROWS + 5, 8), (NUM_ROWS, 2)]
    assert "users (37 rows, 5 new ones)" in found.describe()
    (told,) = refused(manifest, [grown, spec_of("items")])
    assert "users=grow keeps the rows of the commit and adds new ones" in told
    (told,) = refused(manifest, [spec_of("users", num_rows=NUM_ROWS - 1), spec_of("items")], "users=grow")
    assert "fewer than the 37 in the commit: it cannot grow" in told
    (told,) = refused(manifest, [spec_of("users", num_rows=50, dim=4), spec_of("items")], "users=grow")
    assert "dimension 4" in told
    (told,) = refused(manifest, [spec_of("users", num_rows=50, optimizer=Adam(0.1)), spec_of("items")], "users=grow")
    assert "optimizer with slots" in told
    with pytest.raises(ConfigurationError, match="Found rule 'users=grow=old'"):
        parse_rules(["users=grow=old"])


def test_a_table_whose_rows_are_chosen_by_hash_does_not_grow(small_data: str) -> None:
    job = small_job(folder=small_data)
    refuse_hashed_growth(job, parse_rules(["audit=grow"]))
    hashed = replace(
        job, data=replace(job.data, features={**job.data.features, "audit": IdColumn("sample_id", "hash")})
    )
    refuse_hashed_growth(hashed, parse_rules(["audit=reinit"]))
    with pytest.raises(ConfigurationError, match="audit=grow for a table whose rows feature 'audit' chooses by hash"):
        refuse_hashed_growth(hashed, parse_rules(["audit=grow"]))
