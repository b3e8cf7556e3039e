"""Which plan a new run would follow, as text."""

from __future__ import annotations

from collections.abc import Sequence

from podembed.embedding.costs.profile import TableProfile
from podembed.orchestrator.api.text import columns, printable
from podembed.orchestrator.decisions.table_plan import render
from podembed.orchestrator.planning.best import FIRST_GAIN, Tables, candidates, fastest
from podembed.workers.calibration.record import Calibration
from podembed.workers.input.index import InputIndex
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import choose_buckets


def render_followed(
    job: JobConfig,
    index: InputIndex | None,
    calibration: Calibration,
    profiles: Sequence[TableProfile],
    *,
    num_hosts: int,
    threads: int,
) -> str:
    """All plans with what hosts take, and the tables of the chosen one where that is not the rule."""
    tables = Tables(job=job, buckets=choose_buckets(job), index=index, num_hosts=num_hosts, threads=threads)
    found = candidates(tables, calibration, profiles)
    best = fastest(found, least_gain=FIRST_GAIN)
    lines = [("plan of a new run", "hosts take, ms a step", "")]
    lines += [(one.name, f"{1e3 * one.step_s:.2f}", "chosen" if one is best else "") for one in found]
    text = printable(columns(lines))
    return text if best is found[0] else f"{text}\n\n{render(best.plan)}"
