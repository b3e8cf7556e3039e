"""What a run keeps is remembered by the run: written when it changes, read strictly, and taken where nobody says
otherwise.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from podembed.jobs.cli import settings
from podembed.jobs.cli.main import Resume, Train
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.orchestrator.api.save_policies import OnBest
from podembed.orchestrator.run.policy_record import PolicyRecord, read_policies, record_policies
from podembed.tools.fsck.check import check_run
from podembed.workers.storage.records import encode
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, seal
from tests.jobs.cli.test_main import run as podembed
from tests.orchestrator.committed_tables import commit_tables, create_run, flip_byte, random_table

ALL = CheckpointConfig(num_to_keep=7, keep_every_steps=100, keep_best=2, metric="log_loss", on_best=True)


def test_the_newest_record_counts_and_equal_ones_are_not_repeated(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert read_policies(store) is None
    for generation, config in ((1, ALL), (2, ALL), (9, CheckpointConfig(num_to_keep=None)), (10, ALL)):
        record_policies(store, config, generation=generation)
        assert read_policies(store) is not None
    assert store.list() == ["policies/g00000001.json", "policies/g00000009.json", "policies/g00000010.json"]
    record = read_policies(store)
    assert record == PolicyRecord.of(ALL, generation=10)
    assert record is not None
    assert record.config == ALL


def test_a_damaged_or_foreign_record_is_refused_and_replaced_by_the_next_driver(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record_policies(store, ALL, generation=3)
    flip_byte(tmp_path / "policies/g00000003.json", at=20)
    with pytest.raises(DocumentRefused, match=r"policies/g00000003\.json"):
        read_policies(store)
    record_policies(store, ALL, generation=4)
    assert read_policies(store) == PolicyRecord.of(ALL, generation=4)
    store.create_exclusive("policies/g00000005.json", encode(PolicyRecord.of(ALL, generation=4)))
    with pytest.raises(DocumentRefused, match="those of 5"):
        read_policies(store)


@pytest.mark.parametrize(
    "wrong", [{"num_to_keep": 1}, {"keep_every_steps": 0}, {"keep_best": -1}, {"metric_order": "up"}]
)
def test_a_record_that_no_driver_would_write_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    fields = {"num_to_keep": 3, "keep_every_steps": None, "keep_best": 0, "metric": "auc", "on_best": False} | wrong
    store = Store(tmp_path)
    store.create_exclusive("policies/g00000001.json", encode(PolicyRecord(generation=1, **fields)))  # type: ignore[arg-type]
    with pytest.raises(DocumentRefused, match=str(next(iter(wrong)))):
        read_policies(store)


def test_a_record_of_an_older_version_is_read(tmp_path: Path) -> None:
    """It has no `metric_order`: its metrics told by their names which way is better."""
    fields = {"generation": 1, "num_to_keep": 3, "keep_every_steps": None, "keep_best": 2, "metric": "log_loss"}
    store = Store(tmp_path)
    store.create_exclusive("policies/g00000001.json", seal({**fields, "on_best": True}))
    record = read_policies(store)
    assert record is not None
    assert record.config == CheckpointConfig(keep_best=2, metric="log_loss", on_best=True)
    assert OnBest("log_loss") in record.config.save_policies


def test_a_resumed_run_keeps_as_before_unless_it_is_told_otherwise() -> None:
    recorded = PolicyRecord.of(ALL, generation=1)

    def kept(command: Train | Resume, record: PolicyRecord | None = recorded) -> tuple[object, ...]:
        config = settings.run_config(command, steps=1000, recorded=record).checkpoint_config
        return config.num_to_keep, config.keep_every_steps, config.keep_best, config.metric, config.on_best

    assert kept(Resume(run="x")) == (7, 100, 2, "log_loss", True)
    assert kept(Train(resume=True)) == (7, 100, 2, "log_loss", True)
    assert kept(Resume(run="x", keep=4)) == (4, 100, 2, "log_loss", True)
    assert kept(Resume(run="x", keep_every="5", keep_best=0)) == (7, 5, 0, "log_loss", False)
    assert kept(Train(), None) == (3, None, 0, None, False)
    assert kept(Train(keep=5, keep_best=1), None) == (5, None, 1, None, True)
    assert kept(Train(keep_best=1, metric="loss"), None)[3] == "loss"
    assert kept(Resume(run="x", metric="loss"))[3] == "loss"
    unused = PolicyRecord.of(CheckpointConfig(), generation=1)
    assert kept(Resume(run="x", keep_best=1), unused)[2:4] == (1, None), "the job decides"
    everything = PolicyRecord.of(CheckpointConfig(num_to_keep=None), generation=1)
    assert kept(Resume(run="x"), everything)[0] is None
    config = settings.run_config(Resume(run="x"), steps=1000, recorded=recorded).checkpoint_config
    assert OnBest("log_loss") in config.save_policies
    with pytest.raises(ConfigurationError, match="Found --keep 1"):
        settings.run_config(Resume(run="x", keep=1), steps=1)


def test_fsck_names_a_damaged_record(tmp_path: Path) -> None:
    store, lease = create_run(tmp_path / "run", {})
    record_policies(store, ALL, generation=1)
    lease.release()
    assert check_run(store.location).is_intact
    flip_byte(tmp_path / "run/policies/g00000001.json", at=20)
    (finding,) = check_run(store.location).all_findings
    assert (finding.file, finding.place) == ("policies/g00000001.json", "the keep policies")


def test_prune_keeps_what_the_run_keeps(tmp_path: Path) -> None:
    tables = {"users": random_table(1, num_rows=37, num_buckets=4, widths={"rows": 3})}
    store, lease = create_run(tmp_path / "run", tables)
    record_policies(store, CheckpointConfig(keep_every_steps=20), generation=1)
    for step in (10, 20, 30, 40, 50, 60):
        commit_tables(store, lease, step, tables)
    lease.release()

    def prune(*flags: str) -> list[str]:
        assert podembed("prune", str(tmp_path / "run"), "--keep", "2", *flags)[0] == 0
        return [name[7:10] for name in store.children("commit")]

    assert prune() == ["010", "020", "040", "050", "060"]
    # 4,000 samples in batches of 1,024: four steps each.
    assert prune("--keep-every", "10epochs") == ["010", "040", "050", "060"]
    assert prune("--keep-every", "0") == ["050", "060"]
