"""Overlap, staleness and the narrow wire on real hosts: the first changes no byte, the second is what its definition
computes, the third costs the precision that it says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.embedding.buckets import split_evenly
from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.host.exchange import PREFETCH_RETRY_AT
from podembed.workers.host.prefetch_choice import TRIAL_AT, TRIAL_STEPS, PrefetchChoice
from podembed.workers.job.job import JobConfig, JobError
from tests.long_tests import long_case
from tests.run_state import assert_same_bytes
from tests.small_job import NUM_LANES, small_job
from tests.workers.host.test_host import RATE, Dense, Pod, pod, set_machines_apart

# Of tables a, b, bags and audit. The last has a row for each sample, so none of its bags touches what the step before
# touched.
BUCKETS = (1, 8, 4, 1)
ALL_WHOLE = (1, 1, 1, 1)


@pytest.fixture(scope="module")
def job(small_data: str) -> JobConfig:
    return small_job(folder=small_data, evaluate=True)


@pytest.fixture(params=["one machine", "many machines"])
def machines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "many machines":
        set_machines_apart(monkeypatch)
    return request.param


def random_cuts(last: int, seed: int) -> list[int]:
    random = np.random.default_rng(seed)
    return [0, *sorted(random.choice(np.arange(1, last), 4, replace=False).tolist()), last]


def windows(hosts: Pod, cuts: Sequence[int], commits: Sequence[int] = ()) -> Iterator[int]:
    """Trains window by window as the driver does; yields the step after each."""
    for first, last in itertools.pairwise(cuts):
        hosts.train(first, last, is_followed=last not in (*commits, cuts[-1]))
        yield last


def bytes_sent(hosts: Pod) -> int:
    return sum(worker._present.mesh.statistics.bytes_sent for worker in hosts.workers)


@pytest.mark.parametrize("buckets", [BUCKETS, ALL_WHOLE])
@pytest.mark.parametrize("num_hosts", [long_case(1), long_case(2), 3])
def test_overlap_changes_no_byte(
    job: JobConfig, tmp_path: Path, num_hosts: int, buckets: tuple[int, ...], machines: str
) -> None:
    """All combiners, rows and pooled vectors, windows cut at random, evaluations and the padded end of an epoch in
    between.
    """
    last, states, scores, sent, seen = 23, [], [], [], []
    for overlap in (False, True):
        seed = 7 * num_hosts + overlap
        with pod(
            replace(job, overlap=overlap), tmp_path / str(overlap), num_hosts, buckets=buckets, hold_s=0.003
        ) as hosts:
            hosts.all("restore", [(None,)] * num_hosts)
            # Of the steps alone: greetings between on_same_machine tell numbers of descriptors, some of which have more
            # digits than others.
            greeted = bytes_sent(hosts)
            for _ in windows(hosts, random_cuts(last, seed)):
                pass
            sent.append(bytes_sent(hosts) - greeted)
            seen.append([device.seen for device in hosts.devices])
            scores.append(np.concatenate([part.scores for part in hosts.all("evaluate")]))
            states.append(hosts.state("end"))
    assert_same_bytes(*states)
    assert scores[0].tobytes() == scores[1].tobytes()
    for without, with_it in zip(*seen, strict=True):
        for step in range(last):
            assert all((a == b).all() for a, b in zip(without[step], with_it[step], strict=True))
    # The masks are what overlap adds, so prefetched vectors did travel; pooled ones of one machine need none.
    assert (sent[1] > sent[0]) == (num_hosts > 1 and (machines == "many machines" or buckets != ALL_WHOLE))


def test_early_vectors_are_most_of_the_audit_table(job: JobConfig, tmp_path: Path) -> None:
    """What the test above compares is not a path that nothing takes."""
    with pod(replace(job, overlap=True), tmp_path, 1, buckets=BUCKETS) as hosts:
        hosts.all("restore", [(None,)])
        (window,) = hosts.train(0, 3)
        assert {"split", "early pool", "early exchange"} <= set(window.phase_s)
        (worker,) = hosts.workers
        generation = worker._present
        reader, lookups = generation._input.training(3), generation._lookups
        steps = [generation.windows.steps.prepare(reader, number) for number in (3, 4)]
        before, after = (step.lookup.requests[1] for step in steps)
        lookups.both.pooled.split(after, before)
        split = after.splits[0]
        assert split is not None
        names = [lookups.both.features[at].name for at in lookups.both.layout.order]
        assert len(split.rest[names.index("audit")]) == 0
        assert len(split.rest[names.index("a")]) > 48


def test_rows_go_early_where_a_host_would_wait_for_its_device(job: JobConfig, tmp_path: Path) -> None:
    with pod(replace(job, overlap=None), tmp_path, 2, buckets=BUCKETS, hold_s=0.3) as hosts:
        hosts.all("restore", [(None,)] * 2)
        first = hosts.train(0, 5)
        assert not any("split" in window.phase_s for window in first), "it must know first what a step takes without"
        hosts.train(5, 14)  # step 13 is the first one that is tried
        assert all("split" in window.phase_s for window in hosts.train(14, 16))


@pytest.mark.parametrize(("wait_s", "pays"), [(0.009, False), (0.011, True)])
def test_the_shortest_wait_counts_and_is_measured_again(wait_s: float, pays: bool) -> None:
    choice = PrefetchChoice(None)
    choice.saw_wait(5.0)  # the first step compiles
    assert not any(choice.wants(step) for step in range(200)), "it must know first what a step takes without"
    choice.saw_wait(wait_s)
    choice.saw_wait(0.02)
    assert [step for step in range(1, 20) if choice.wants(step)] == [5, 13]
    choice.saw_split(0.01)
    assert [step for step in range(30, 50) if not choice.wants(step)] == ([38, 39] if pays else list(range(30, 50)))
    for _ in range(3):
        choice.saw_wait(0.009)
    choice.saw_split(0.01)
    assert choice.wants(100) == pays, "equal costs change nothing"
    for _ in range(3):
        choice.saw_wait(0.007)
    choice.saw_split(0.01)
    assert not choice.wants(100)


@pytest.mark.parametrize(("with_it_s", "is_kept"), [(0.020, True), (0.030, False), (0.025, False), (0.0249, False)])
def test_whole_steps_tell_whether_it_pays(with_it_s: float, is_kept: bool) -> None:
    """A wait longer than the split is not enough: the processor may have had other work meanwhile."""
    choice, before = PrefetchChoice(None), None
    for _ in range(3):
        choice.saw_wait(0.01)
    choice.saw_split(0.005)
    wanted = []
    for step in range(TRIAL_AT - 4, TRIAL_AT + TRIAL_STEPS + 30):
        wanted.append(choice.wants(step))
        if wanted[-1] == before:
            choice.saw_step(with_it_s if before else 0.025, is_prefetching=wanted[-1])
        before = wanted[-1]
    assert wanted[:28] == [True] * 4 + [True] * 6 + [False] * 12 + [True] * 6
    kept = [step for step in range(28, 4 + TRIAL_STEPS) if wanted[step]]
    assert len(kept) > 200 if is_kept else not kept
    # The next trial is like the first one.
    assert wanted[4 + TRIAL_STEPS : 28 + TRIAL_STEPS] == wanted[4:28]


@pytest.mark.parametrize("is_faster", [True, False])
def test_a_trial_that_saw_too_little_decides_nothing(is_faster: bool) -> None:
    """As in windows of two or three steps."""
    choice = PrefetchChoice(None)
    for _ in range(3):
        choice.saw_wait(0.01)
    choice.saw_split(0.005)

    def trial(num_with_it: int, with_it_s: float) -> None:
        for step in range(TRIAL_AT, TRIAL_AT + 24):
            choice.wants(step)
            if step < TRIAL_AT + num_with_it:
                choice.saw_step(with_it_s, is_prefetching=True)
            choice.saw_step(0.01, is_prefetching=False)

    trial(20, 0.005 if is_faster else 0.02)
    assert choice.wants(TRIAL_AT + 24) == is_faster
    trial(3, 0.02 if is_faster else 0.005)
    assert choice.wants(TRIAL_AT + 24) == is_faster


def test_what_a_run_declares_needs_no_trial() -> None:
    for declared in (True, False):
        choice = PrefetchChoice(declared)
        assert {choice.wants(step) for step in range(400)} == {declared}


def test_where_nothing_is_early_all_hosts_stop_looking_for_a_while(job: JobConfig, tmp_path: Path) -> None:
    """The 50 rows of table a are all touched in every step of so many samples; the first look and those at agreed steps
    are all there are.
    """
    features = {"a": job.features["a"]}
    columns = {name: column for name, column in job.data.features.items() if name in features}
    job = replace(job, features=features, data=replace(job.data, features=columns), batch_size=384, overlap=True)
    with pod(job, tmp_path, 2, buckets=(1,)) as hosts:
        hosts.all("restore", [(None,)] * 2)
        looked = []
        for step in range(1, PREFETCH_RETRY_AT + 4, 2):
            # Of two steps in a window, the second one is looked up ahead.
            windows = hosts.train(step - 1, step + 1)
            looked += [step for window in windows if "split" in window.phase_s]
    assert looked == [1, 1, PREFETCH_RETRY_AT, PREFETCH_RETRY_AT]


# ------------------------------------------------------------------ staleness


@pytest.fixture(scope="module")
def plain_job(job: JobConfig) -> JobConfig:
    """Gradient descent everywhere, which can be written down in a line, and a step of staleness."""
    tables = {id(t): TableConfig(t.vocabulary_size, t.dim, optimizer=SGD(RATE), name=t.name) for t in job.tables}
    features = {
        name: FeatureConfig(tables[id(feature.table)], combiner=feature.combiner)
        for name, feature in job.features.items()
    }
    return replace(job, features=features, staleness=1)


class StaleDense(Dense):
    """The definition: a step is looked up before the update of the step before it is applied, but after a commit."""

    def __init__(self, job: JobConfig, buckets: tuple[int, ...]) -> None:
        super().__init__(job, buckets)
        self.waiting: list[np.ndarray] | None = None

    def step(self, number: int) -> list[np.ndarray]:
        activations, change = self.look_up(number)
        self.commit()
        self.waiting = change
        return activations

    def commit(self) -> None:
        if self.waiting is not None:
            self.apply(self.waiting)
        self.waiting = None


@pytest.mark.parametrize("num_hosts", [long_case(1), long_case(2), 3])
def test_staleness_1_misses_exactly_the_newest_update(
    plain_job: JobConfig, tmp_path: Path, num_hosts: int, machines: str
) -> None:
    """In float64 by hand; windows are cut at random, with evaluations, and a commit after step 8."""
    dense, last, commit = StaleDense(plain_job, BUCKETS), 23, 9
    cuts = sorted({*random_cuts(last, num_hosts), commit})
    with pod(plain_job, tmp_path, num_hosts, buckets=BUCKETS, hold_s=0.003) as hosts:
        hosts.all("restore", [(None,)] * num_hosts)
        seen: list[dict[int, list[np.ndarray]]] = [{} for _ in hosts.devices]
        for step in windows(hosts, cuts, commits=[commit]):
            for kept, device in zip(seen, hosts.devices, strict=True):
                kept.update(device.seen)
            if step == commit:
                hosts.save("commit")
            elif step < last:
                hosts.all("evaluate")
                for device in hosts.devices:
                    # Steps of the evaluation have the same numbers.
                    device.seen.clear()
        state = hosts.state("end")
    for step in range(last):
        expected = dense.step(step)
        if step + 1 == commit:
            dense.commit()
        for feature, values in enumerate(expected):
            first = 0
            for lanes, kept in zip(split_evenly(NUM_LANES, num_hosts), seen, strict=True):
                count = len(lanes) * dense.reader.plan.rows_per_lane_step
                found = kept[step][feature][:count]
                np.testing.assert_allclose(found, values[first : first + count], rtol=1e-4, atol=1e-5)
                first += count
    dense.commit()
    for spec, table in zip(dense.specs, dense.tables, strict=True):
        np.testing.assert_allclose(state[f"{spec.name}/rows"], table, rtol=1e-4, atol=1e-5)


def test_staleness_1_does_not_depend_on_windows_evaluations_or_memory(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, last, commit, states = replace(job, staleness=1), 17, 8, []
    for number, cuts in enumerate(([0, commit, last], [0, 1, 2, commit, 11, last], [0, 3, commit, 9, 16, last])):
        if number == 2:
            set_machines_apart(monkeypatch)
        with pod(job, tmp_path / str(number), 3, buckets=BUCKETS) as hosts:
            hosts.all("restore", [(None,)] * 3)
            for step in windows(hosts, cuts, commits=[commit]):
                if number == 1 and step != commit:
                    hosts.all("evaluate")
            states.append(hosts.state("end"))
    for state in states[1:]:
        assert_same_bytes(states[0], state)


def test_staleness_1_resumes_from_a_commit_to_the_same_bytes(job: JobConfig, tmp_path: Path) -> None:
    job, last, commit = replace(job, staleness=1), 15, 6
    tables: tuple[TableFiles, ...] | None = None
    states: list[dict[str, Any]] = []
    for first in (0, commit):
        with pod(job, tmp_path, 2, buckets=BUCKETS) as hosts:
            hosts.all("restore", [(tables,)] * 2)
            for step in windows(hosts, sorted({first, commit, 10, last}), commits=[commit]):
                if step == commit:
                    tables = hosts.save("commit")
            states.append(hosts.state(f"end-{first}"))
    assert_same_bytes(*states)


# ------------------------------------------------------------------ the narrow wire


@pytest.mark.parametrize("staleness", [0, 1])
def test_bfloat16_halves_the_vectors_and_rounds_each_once(
    job: JobConfig, tmp_path: Path, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number is off by at most 2^-8 of itself; a bag of rows by that much of the sum of their magnitudes, here of 20
    rows at most.
    """
    set_machines_apart(monkeypatch)
    sent, seen, states = [], [], []
    for wire_dtype in ("float32", "bfloat16"):
        with pod(
            replace(job, wire_dtype=wire_dtype, staleness=staleness), tmp_path / wire_dtype, 3, buckets=BUCKETS
        ) as hosts:
            hosts.all("restore", [(None,)] * 3)
            before = bytes_sent(hosts)
            hosts.train(0, 12)
            sent.append(bytes_sent(hosts) - before)
            seen.append([device.seen for device in hosts.devices])
            states.append(hosts.state("end"))
    assert 0.5 * sent[0] < sent[1] < 0.8 * sent[0], "ids and masks stay as they are"
    is_rounded = False
    for exact, rounded in zip(*seen, strict=True):
        for full, narrow in zip(exact[0], rounded[0], strict=True):
            # Step 0 reads first values, the same in both; the largest magnitude of a feature bounds its rows.
            error = np.abs(full - narrow)
            assert (error <= 2**-8 * 20 * np.abs(full).max()).all()
            is_rounded |= bool(error.any())
        pooled_at_owner = exact[0][0], rounded[0][0]
        assert (np.abs(pooled_at_owner[0] - pooled_at_owner[1]) <= 2**-8 * np.abs(pooled_at_owner[0])).all()
    assert is_rounded
    for name, values in states[0].items():
        if name != "audit/rows":
            np.testing.assert_allclose(states[1][name], values, rtol=0.05, atol=0.02 * np.abs(values).max())


def test_what_hosts_of_one_machine_share_is_never_rounded(job: JobConfig, tmp_path: Path) -> None:
    states = []
    for wire_dtype in ("float32", "bfloat16"):
        with pod(replace(job, wire_dtype=wire_dtype), tmp_path / wire_dtype, 2, buckets=ALL_WHOLE) as hosts:
            hosts.all("restore", [(None,)] * 2)
            # On two hosts all tables lie whole on one of them, so nothing but pooled vectors leaves a host.
            hosts.train(0, 8)
            states.append(hosts.state("end"))
    assert_same_bytes(*states)


def test_other_staleness_and_wires_are_refused(job: JobConfig) -> None:
    with pytest.raises(JobError, match=r"Found staleness=2. Expected 0, .* or 1"):
        replace(job, staleness=2)
    with pytest.raises(JobError, match="Found staleness=-1"):
        replace(job, staleness=-1)
    with pytest.raises(JobError, match="Found wire_dtype='float16'. Expected 'float32', or 'bfloat16'"):
        replace(job, wire_dtype="float16")
