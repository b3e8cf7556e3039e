"""Columns of a request: what callers hold in their hands, in the kinds that the model was trained with."""

from __future__ import annotations

from array import array
from collections import deque
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from podembed.serving.artifact.exported_columns import ModelError, ids_of, with_times
from podembed.serving.artifact.exported_model import _values


def column_of(**fields: Any) -> dict[str, Any]:
    return {"unit": None, "since": None, "holds": "integers", **fields}


@pytest.mark.parametrize(
    "values",
    [range(1, 3), deque([1, 2]), memoryview(array("q", [1, 2])), [jnp.int32(1), jnp.int32(2)], [np.array(1), 2]],
)
def test_sequences_and_arrays_without_axes_are_the_values_that_they_hold(values: Any) -> None:
    assert with_times(_values(values, "c"), column_of(), "c").tolist() == [1, 2]


@pytest.mark.parametrize("values", ["ab", b"ab", bytearray(b"ab"), {1: 2}, {1}])
def test_what_is_no_sequence_of_values_is_refused(values: Any) -> None:
    with pytest.raises(ModelError, match="Expected a list or an array"):
        _values(values, "c")


def test_a_duration_of_numpy_is_no_integer() -> None:
    column = column_of(holds="durations", unit="s")
    assert with_times([np.timedelta64(3, "s")], column, "c").tolist() == [timedelta(seconds=3)]


@pytest.mark.filterwarnings("error")
def test_times_with_a_zone_are_those_in_utc_and_nothing_is_missing_in_the_words_of_numpy() -> None:
    east = timezone(timedelta(hours=2))
    given = [datetime(2020, 1, 1, 1, tzinfo=east), np.datetime64("NaT"), None, datetime(2020, 1, 1)]
    found = with_times(given, column_of(holds="times", unit="d"), "c")
    expected = [datetime(2019, 12, 31, 23, tzinfo=UTC), None, None, datetime(2020, 1, 1, tzinfo=UTC)]
    assert found.tolist() == [one and one.replace(tzinfo=None) for one in expected]


@pytest.mark.parametrize("values", [[True, 1], [1, True, None], [[1], [2, True]], [True], [1, np.True_]])
def test_a_truth_value_is_no_id_beside_integers_either(values: Any) -> None:
    ids = {"column": "c", "crossed_with": [], "weights": None, "boundaries": None, "missing": "drop"}
    with pytest.raises(ModelError, match="bool"):
        ids_of({"c": values}, column_of(**ids, mode="row", vocabulary_size=9, invalid_ids="error"), None)
