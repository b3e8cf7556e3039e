"""The plan of a job: what is printed is where the driver puts tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from podembed.embedding.lookup.placement import place_tables
from podembed.embedding.optimizers import SGD
from podembed.jobs.planning.tables import render_tables
from podembed.orchestrator.decisions.table_plan import plan, summary
from podembed.workers.data.input_files import InputFile
from podembed.workers.input.index import InputIndex
from podembed.workers.job.tables import choose_buckets, features_per_table, table_specs
from tests.small_job import B_ROWS, BATCH_SIZE, small_job


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 7])
def test_the_plan_is_the_drivers_placement(tmp_path: Path, num_hosts: int) -> None:
    job = small_job(folder=str(tmp_path))
    specs = table_specs(job, choose_buckets(job))
    placed = place_tables(specs, num_features=features_per_table(job), num_hosts=num_hosts)
    found = plan(job, num_hosts=num_hosts)
    for table, spec, owners in zip(found.tables, specs, placed, strict=True):
        assert table.hosts == tuple(np.unique(owners))
        assert table.is_whole == (len(table.hosts) == 1)
        assert table.is_pooled or not table.is_whole
        assert table.spec == spec
    held = [
        sum(int((o == h).sum()) * s.bucket_bytes for o, s in zip(placed, specs, strict=True)) for h in range(num_hosts)
    ]
    assert [host.shard_bytes for host in found.hosts] == held
    assert sum(host.num_pooled for host in found.hosts) == sum(
        t.num_features for t in found.tables if t.is_pooled and t.is_whole
    )
    assert {host.incoming_bytes for host in found.hosts} == {None}


def test_what_a_change_of_hosts_moves(tmp_path: Path) -> None:
    """A host that stays reads nothing of what it held; a new one reads all that it gets."""
    job = small_job(folder=str(tmp_path))
    specs = table_specs(job, choose_buckets(job))
    before = place_tables(specs, num_features=features_per_table(job), num_hosts=2)
    previous = {spec.name: owners.tolist() for spec, owners in zip(specs, before, strict=True)}
    same = plan(job, num_hosts=2, previous=previous)
    assert [host.incoming_bytes for host in same.hosts] == [0, 0]
    grown = plan(job, num_hosts=3, previous=previous)
    assert grown.hosts[2].incoming_bytes == grown.hosts[2].shard_bytes > 0
    assert all((host.incoming_bytes or 0) < host.shard_bytes for host in grown.hosts[:2])


def test_text_names_every_table_with_its_reason(tmp_path: Path) -> None:
    text = render_tables(plan(small_job(folder=str(tmp_path)), num_hosts=2))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert f"{B_ROWS:,}" in lines["b"]
    assert "all hosts" in lines["b"]
    assert "above a host's fair share" in lines["b"]
    assert lines["a"].endswith("one bucket")
    assert {"bags", "audit"} <= set(lines)
    assert "cut over the hosts" in summary(plan(small_job(folder=str(tmp_path)), num_hosts=2))


def test_a_cut_table_says_which_way_its_bags_go(tmp_path: Path) -> None:
    """Many ids a bag are pooled by their owners, single ones travel as rows; a few say that nobody counted them."""
    job = small_job(folder=str(tmp_path))
    file = InputFile(
        path="a", size_bytes=1, version="", row_group_rows=(9,), content="b: integers", lengths=(("bag", 20.0),)
    )
    single = line_of(render_tables(plan(job, num_hosts=2, index=InputIndex(files=(file,)))), "b")
    assert "a batch has 1 ids a bag" in single
    assert "rows are no more than" in single
    lists = replace(file, content="b: lists of integers", lengths=(("b", 20.0),))
    pooled = line_of(render_tables(plan(job, num_hosts=2, index=InputIndex(files=(lists,)))), "b")
    assert "a batch has 20 ids a bag" in pooled
    assert "partial sums of owners are less than" in pooled
    assert "unknown lengths count as 4 ids" in line_of(render_tables(plan(job, num_hosts=2)), "b")


def test_one_host_holds_everything_whole(tmp_path: Path) -> None:
    assert summary(plan(small_job(folder=str(tmp_path)), num_hosts=1)).startswith(
        "tables: 4 whole at one host; a host holds "
    )


def test_equal_tables_are_one_line_with_a_count(tmp_path: Path) -> None:
    base = small_job(folder=str(tmp_path))
    names = [f"c{number}" for number in range(26)]
    features = {name: FeatureConfig(TableConfig(1000, 8, combiner="mean", name=name)) for name in names}
    features["other"] = FeatureConfig(TableConfig(1001, 8, combiner="mean", name="other"))
    data = replace(base.data, features=dict.fromkeys(features, "a"))
    job = replace(base, features=features, data=data)
    text = render_tables(plan(job, num_hosts=2))
    (line,) = [line for line in text.splitlines() if "c0" in line]
    assert line.split()[:5] == ["26", "tables:", "c0", "...", "c25"]
    assert "2 hosts, 12 to 14 on each" in line
    assert "c7" not in text
    assert len([line for line in text.splitlines() if line.split()[:1] == ["other"]]) == 1
    (alone,) = [line for line in render_tables(plan(job, num_hosts=1)).splitlines() if "c0" in line]
    assert "host 0" in alone


def line_of(text: str, table: str) -> str:
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [table]]
    return line


def test_a_small_table_that_sends_rows_is_not_called_cut(tmp_path: Path) -> None:
    """One bucket lies on one host, whatever crosses the network; what it does not pool is not counted there."""
    base = small_job(folder=str(tmp_path))
    words = TableConfig(100, 8, combiner="sum", name="words")
    slow = TableConfig(100, 8, name="slow", optimizer=SGD(0.1, use_gradient_accumulation=False))
    rounded = TableConfig(100, 8, name="rounded", quantization_config=QuantizationConfig(4, -1.0, 1.0))
    features = {
        **base.features,
        "words": FeatureConfig(words, max_sequence_length=3),
        "slow": FeatureConfig(slow),
        "rounded": FeatureConfig(rounded),
    }
    job = replace(base, features=features, data=replace(base.data, features=dict.fromkeys(features, "a")))
    found = plan(job, num_hosts=2)
    text = render_tables(found)
    assert line_of(text, "words").endswith("one bucket; a sequence keeps its rows apart, so rows travel")
    assert line_of(text, "slow").endswith("one bucket; its optimizer does not accumulate gradients, so rows travel")
    assert line_of(text, "rounded").endswith(
        "one bucket; its rows are quantized before they are combined, so rows travel"
    )
    whole = [table.spec.name for table in found.tables if len(table.hosts) == 1]
    assert {"words", "slow", "rounded"} <= set(whole)
    assert f"{len(whole)} whole at one host" in summary(found)
    assert sum(host.num_pooled for host in found.hosts) == sum(
        t.num_features for t in found.tables if t.is_pooled and t.is_whole
    )
    assert not {"words", "slow", "rounded"} & {table.spec.name for table in found.tables if table.is_pooled}


def test_the_hosts_of_a_table_with_fewer_buckets_than_hosts_are_counted(tmp_path: Path) -> None:
    found = plan(small_job(folder=str(tmp_path)), num_hosts=7)
    (cut,) = [table for table in found.tables if 1 < len(table.hosts) < 7]
    assert f"{len(cut.hosts)} of 7 hosts" in line_of(render_tables(found), cut.spec.name)


def test_a_new_run_is_planned_with_the_buckets_that_it_would_have(tmp_path: Path) -> None:
    """Of a run with many lanes small tables have more than their size asks for, so that many hosts can share them."""
    job = replace(small_job(folder=str(tmp_path)), num_lanes=BATCH_SIZE)
    buckets = [table.spec.layout.num_buckets for table in plan(job, num_hosts=2).tables]
    assert buckets == list(choose_buckets(job))
    assert buckets != [spec.layout.num_buckets for spec in table_specs(job, (None,) * len(job.tables))]
