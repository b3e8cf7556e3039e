"""Hosts that change their plan at a commit, with the arrays of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from podembed.workers.job.job import JobConfig
from tests.run_state import assert_same_bytes
from tests.small_job import small_job
from tests.workers.host.test_host import BUCKETS, pod

CHANGE, END = 3, 6
POOLED, ROWS = (True,) * len(BUCKETS), (False,) * len(BUCKETS)


def trained(
    job: JobConfig, folder: Path, plans: list[tuple[int, int, tuple[bool, ...] | None]]
) -> list[dict[str, np.ndarray]]:
    """The states after each generation: first and last step, and who pools where a table is cut. Each begins from the
    commit of its first step.
    """
    commits, states = {}, []
    for number, (first, last, pools_cut) in enumerate(plans):
        with pod(job, folder / "run", 2, buckets=BUCKETS, pools_cut=pools_cut) as hosts:
            hosts.all("restore", [(commits.get(first),)] * 2)
            hosts.train(first, last)
            commits[last] = hosts.save(f"c-{number}")
            states.append(hosts.state(f"s-{number}"))
    return states


def test_a_plan_changed_at_a_commit_has_the_bytes_of_one_that_begins_there(small_data: str, tmp_path: Path) -> None:
    job = small_job(folder=small_data, audit=False)
    *_, changed = trained(job, tmp_path / "a", [(0, CHANGE, POOLED), (CHANGE, END, ROWS)])
    # Killed once before the commit of the change, and once after it.
    again = trained(
        job,
        tmp_path / "b",
        [(0, CHANGE - 1, POOLED), (0, CHANGE, POOLED), (CHANGE, END - 1, ROWS), (CHANGE, END, ROWS)],
    )
    assert_same_bytes(again[-1], changed)
    *_, stayed = trained(job, tmp_path / "c", [(0, CHANGE, POOLED), (CHANGE, END, POOLED)])
    for name, values in stayed.items():
        np.testing.assert_allclose(changed[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    # Otherwise this would compare a plan with itself: sums come in another order.
    assert any(values.tobytes() != changed[name].tobytes() for name, values in stayed.items())


def test_hosts_that_are_told_who_pools_do_what_lengths_would_choose(small_data: str, tmp_path: Path) -> None:
    job = small_job(folder=small_data, audit=False)
    (told,) = trained(job, tmp_path / "a", [(0, CHANGE, ROWS)])
    (chosen,) = trained(job, tmp_path / "b", [(0, CHANGE, None)])
    assert_same_bytes(told, chosen)
