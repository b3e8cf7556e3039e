"""Which way a cut table takes, from numbers alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.lookup.pooling_choice import ASSUMED_LENGTH, CutWay, cut_way
from podembed.embedding.optimizers import SGD, Adagrad, Optimizer
from podembed.embedding.table_spec import TableSpec


def way(
    lengths: Sequence[float | None],
    *,
    num_rows: int = 10_000_000,
    num_hosts: int = 2,
    rule: Optimizer | None = None,
    why_rows: str | None = None,
) -> CutWay:
    spec = TableSpec.of(TableConfig(num_rows, 32, name="t", optimizer=rule or Adagrad(0.1)), seed=0)
    return cut_way(spec, lengths=lengths, num_bags=1024, num_hosts=num_hosts, why_rows=why_rows)


@pytest.mark.parametrize(
    ("lengths", "num_hosts", "is_pooled"),
    [
        ([1.0], 2, False),
        ([2.0], 2, False),
        ([3.0], 2, True),
        ([20.0] * 4, 2, True),
        ([20.0] * 4, 19, True),
        ([20.0] * 4, 20, False),
        # Features of a table go one way, since a row gets one update.
        ([1.0, 20.0], 2, True),
        ([1.0, 2.5], 2, False),
        ([ASSUMED_LENGTH], 3, True),
        ([None], 3, True),
        ([None], 4, False),
    ],
)
def test_the_way_with_fewer_bytes(lengths: list[float | None], num_hosts: int, is_pooled: bool) -> None:
    assert way(lengths, num_hosts=num_hosts).is_pooled == is_pooled


def test_a_row_that_many_bags_have_travels_once() -> None:
    """20,480 ids of 1,500 rows are nearly all of these rows."""
    assert way([20.0]).is_pooled
    found = way([20.0], num_rows=1500)
    assert not found.is_pooled
    assert found.reason == "a batch has 20 ids a bag: 1,500 rows are no more than 2,048 partial sums"


def test_the_reason_has_the_numbers() -> None:
    assert way([20.0]).reason == "a batch has 20 ids a bag: 2,048 partial sums of owners are less than 20,459 rows"
    assert way([None, 2.0]).reason.startswith("unknown lengths count as 4 ids, so a batch has 3 ids a bag")


def test_what_cannot_be_pooled_stays_with_rows() -> None:
    unaccumulated = way([20.0], rule=SGD(0.1, use_gradient_accumulation=False))
    assert (unaccumulated.is_pooled, unaccumulated.reason) == (
        False,
        "its optimizer does not accumulate gradients, so rows travel",
    )
    assert not way([20.0], why_rows="a sequence keeps its rows apart").is_pooled
    assert not way([20.0], num_hosts=1).is_pooled
    assert not way([]).is_pooled
