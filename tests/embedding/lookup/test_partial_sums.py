"""Parts of bags and their sums, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.config import TableConfig
from podembed.embedding.lookup.pooled_frames import add_up, frame_of, parts_of, read_frame
from podembed.embedding.lookup.router import Router
from podembed.embedding.ragged import Ragged
from podembed.embedding.table_spec import TableSpec
from tests.long_tests import examples

NUM_ROWS, NUM_BUCKETS, NUM_HOSTS = 70, 8, 3
OWNERS = np.array([0, 2, 0, 1, 2, 2, 0, 1], np.int32)


def router() -> Router:
    config = TableConfig(NUM_ROWS, 2, name="t")
    return Router(TableSpec.of(config, seed=0, num_buckets=NUM_BUCKETS), OWNERS)


def draw(random: np.random.Generator, *, is_weighted: bool) -> Ragged:
    lengths = random.integers(0, 6, 9)
    ids = random.integers(0, NUM_ROWS, int(lengths.sum()))
    weights = random.uniform(0.5, 2.0, len(ids)) if is_weighted else None
    return Ragged.of(ids, np.concatenate([[0], np.cumsum(lengths)]), weights)


def divisor(bags: Ragged, bag: int, combiner: str) -> float:
    """What the sum over a whole bag is divided by."""
    whole = slice(bags.row_splits[bag], bags.row_splits[bag + 1])
    if bags.weights is None:
        total = max(len(bags.values[whole]), 1)
    else:
        total = sum(float(weight) ** (1 if combiner == "mean" else 2) for weight in bags.weights[whole])
    return total**0.5 if combiner == "sqrtn" else total


@settings(deadline=None, max_examples=examples(30))
@given(seed=st.integers(0, 9999), is_weighted=st.booleans(), combiner=st.sampled_from(["sum", "mean", "sqrtn"]))
def test_each_owner_gets_its_part_of_each_bag(seed: int, is_weighted: bool, combiner: str) -> None:
    bags = draw(np.random.default_rng(seed), is_weighted=is_weighted)
    parts = parts_of(router(), bags, combiner, num_hosts=NUM_HOSTS)
    for host, part in enumerate(parts):
        # A frame carries all of it.
        asked = read_frame(frame_of([part]), num_features=1, host=host)
        (again,), ((keys, _),) = asked.values(), asked.keys_and_rows()
        for bag in range(bags.num_samples):
            whole = slice(bags.row_splits[bag], bags.row_splits[bag + 1])
            is_mine = OWNERS[bags.values[whole] % NUM_BUCKETS] == host
            own = slice(again.row_splits[bag], again.row_splits[bag + 1])
            assert keys[own].tolist() == bags.values[whole][is_mine].tolist()
            if bags.weights is not None:
                assert again.weights is not None
                assert again.weights[own].tolist() == bags.weights[whole][is_mine].tolist()
        assert (again.weights is None) == (bags.weights is None)
        if combiner == "sum":
            assert again.divisors is None
        else:
            assert again.divisors is not None
            expected = [divisor(bags, bag, combiner) for bag in range(bags.num_samples)]
            assert again.divisors.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("bad", [-1, 1 << 40])
def test_an_id_outside_the_table_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=f"Found id {bad} for a table of {NUM_ROWS} rows"):
        parts_of(router(), Ragged.of([1, bad], [0, 2]), "sum", num_hosts=NUM_HOSTS)


@pytest.mark.parametrize("own", range(4))
def test_partial_sums_are_added_in_the_order_of_the_hosts(own: int) -> None:
    """The same bits whoever adds them; a denominator of 0 gives zeros."""
    random = np.random.default_rng(0)
    parts = [random.standard_normal((5, 3)).astype(np.float32) * np.float32(10.0**host) for host in range(4)]
    divisors = np.array([1.0, 2.0, 0.0, 3.0, 0.5], np.float32)
    total = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    expected = total / np.where(divisors == 0, np.float32(1), divisors)[:, None]
    expected[2] = 0
    for divided, wanted in ((None, total), (divisors, expected)):
        copies = [part.copy() for part in parts]
        add_up(copies, own, divided)
        assert (copies[own] == wanted).all()
