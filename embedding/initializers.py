"""First values of the rows of a table: a function of (seed, table name, row), never of who owns the row.

Random values are counter-based: every element is a hash (see `hashing`) of the table's key, its row and its column. A
row therefore starts the same on one host or on a thousand. The built-in initializers are values; a callable of the user
is recognized by its parameters, see `row_source`.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numba import njit

from podembed.embedding.hashing import GOLDEN_GAMMA, finalize

FillRows: TypeAlias = Callable[[np.ndarray, np.ndarray], None]
"""`fill(rows int64[n], out float32[n, dim])` writes the first values of those rows."""

# A user's initializer with shard_info is called for this many rows at a time, whatever the number of hosts.
ROWS_PER_SHARD = 4096


@dataclass(frozen=True, slots=True)
class TruncatedNormal:
    """Normal values of standard deviation `stddev` around `mean`, none further than two standard deviations away.

    As in TensorFlow, `stddev` is that of the normal before it is cut; the values' own is 0.88 of it.
    """

    stddev: float = 0.05
    mean: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.stddev < np.inf:
            raise ValueError(f"Found stddev={self.stddev!r}. Expected a number of 0 or more. Pass its absolute value.")

    def __call__(self, rows: np.ndarray, dim: int, seed: int) -> np.ndarray:
        out = np.empty((len(rows), dim), np.float32)
        _fill_truncated_normal(rows, np.uint64(seed), float(self.stddev), float(self.mean), out)
        return out


@dataclass(frozen=True, slots=True)
class RandomNormal:
    """Normal values of standard deviation `stddev` around `mean`, as of `torch.nn.init.normal_` and Keras's
    `RandomNormal`.

    They are made of 24 random bits each, so the furthest are 5.4 standard deviations away.
    """

    stddev: float = 0.05
    mean: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.stddev < np.inf:
            raise ValueError(f"Found stddev={self.stddev!r}. Expected a number of 0 or more. Pass its absolute value.")

    def __call__(self, rows: np.ndarray, dim: int, seed: int) -> np.ndarray:
        out = np.empty((len(rows), dim), np.float32)
        _fill_normal(rows, np.uint64(seed), float(self.stddev), float(self.mean), out)
        return out


@dataclass(frozen=True, slots=True)
class Uniform:
    """Values spread evenly from `low` to `high`."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        if not -np.inf < self.low <= self.high < np.inf:
            raise ValueError(f"Found low={self.low!r} and high={self.high!r}. Expected low not above high. Swap them.")

    def __call__(self, rows: np.ndarray, dim: int, seed: int) -> np.ndarray:
        out = np.empty((len(rows), dim), np.float32)
        _fill_uniform(rows, np.uint64(seed), float(self.low), float(self.high), out)
        return out


@dataclass(frozen=True, slots=True)
class Constant:
    """The same value everywhere."""

    value: float = 0.0

    def __call__(self, rows: np.ndarray, dim: int, seed: int) -> np.ndarray:
        return np.full((len(rows), dim), self.value, np.float32)


@dataclass(frozen=True, slots=True)
class RowId:
    """Row r is filled with `r + offset`; for tests and for finding one's way in exported tables."""

    offset: int = 0

    def __call__(self, rows: np.ndarray, dim: int, seed: int) -> np.ndarray:
        return np.repeat((rows + self.offset).astype(np.float32)[:, None], dim, axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class GivenRows:
    """The rows of an array.

    Attributes:
      values: float32 `[num_rows, dim]`.
    """

    values: np.ndarray

    def __call__(self, rows: np.ndarray, dim: int, seed: int) -> np.ndarray:
        return self.values[rows]


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What an initializer with a `shard_info` parameter gets: it makes `shape` of the table, starting at
    `offset`.
    """

    shape: tuple[int, int]
    offset: tuple[int, int]


def table_seed(seed: int, table_name: str) -> int:
    """63 bits that differ between tables and between runs, the same on every machine and in every process."""
    digest = hashlib.blake2b(f"{seed}/{table_name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def row_source(
    initializer: Callable[..., Any], *, seed: int, table_name: str, num_rows: int | None, dim: int
) -> FillRows:
    """Recognizes an initializer and returns a function that fills any rows of the table.

    Recognized by its parameters:
      * `(rows, dim, seed)`: called for the rows wanted, returns `[n, dim]`. What the built-in ones are; the one that
      scales.
      * `(shape, dtype, shard_info)` in any order: called for runs of 4096 rows with a `ShardInfo`, whatever the number
      of hosts.
      * `(key, shape, dtype)`, as `jax.nn.initializers`: called once, for the whole table.
      * `(shape, dtype)`, as TensorFlow's and Keras's: called once, for the whole table. A random one should have a seed
        of its own, otherwise two runs differ.

    Raises:
      ValueError: the parameters fit none of these, or `num_rows` is missing where it is needed.
    """
    own_seed = table_seed(seed, table_name)
    style = initializer_style(initializer, f"table '{table_name}'")
    if style == "rows":
        return _RowWise(initializer, own_seed, table_name)
    if num_rows is None:
        raise ValueError(
            f"Found initializer {initializer!r} of table '{table_name}', which needs the table's shape, without "
            "num_rows. Expected the number of rows. Pass num_rows."
        )
    if style == "shard_info":
        return _ByShard(initializer, (num_rows, dim), table_name)
    return _Whole(initializer, (num_rows, dim), own_seed if style == "key" else None, table_name)


def initializer_style(initializer: Callable[..., Any], owner: str) -> str:
    """How an initializer is called: "rows" (rows, dim, seed), "shape" (shape, dtype), "shard_info" (shape, dtype,
    shard_info) or "key" (key, shape, dtype).

    Args:
      owner: whose it is, in messages.

    Raises:
      ValueError: its parameters are none of these.
    """
    try:
        parameters = inspect.signature(initializer).parameters
    except (TypeError, ValueError):
        return "shape"
    if "shard_info" in parameters:
        return "shard_info"
    required = [
        p.name
        for p in parameters.values()
        if p.default is inspect.Parameter.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = list(parameters)
    if names[:1] == ["key"]:
        return "key"
    if "rows" in names or len(required) == 3:
        return "rows"
    if names[:1] == ["shape"] or len(required) in (1, 2):
        return "shape"
    raise ValueError(
        f"Found initializer {initializer!r} of {owner} with parameters ({', '.join(names)}). Expected (rows, dim, "
        "seed), (shape, dtype), (shape, dtype, shard_info) or (key, shape, dtype). Wrap it in one of these."
    )


def _checked(values: Any, shape: tuple[int, int], table_name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.shape != shape:
        raise ValueError(
            f"The initializer of table '{table_name}' made shape {array.shape}. Expected {shape}. Return one row for "
            "each requested row."
        )
    return array


def fills_single_rows(initializer: Callable[..., Any], table_name: str) -> bool:
    """Whether first values of some rows cost no more than these rows.

    Raises:
      ValueError: as `row_source`.
    """
    style = initializer_style(initializer, f"table '{table_name}'")
    return style == "rows" and not getattr(initializer, "reads_in_order", False)


class _RowWise:
    """Fills rows from `fn(rows, dim, seed)`."""

    def __init__(self, initializer: Callable[..., Any], own_seed: int, table_name: str) -> None:
        self._initializer, self._seed, self._table_name = initializer, own_seed, table_name

    def __call__(self, rows: np.ndarray, out: np.ndarray) -> None:
        out[...] = _checked(self._initializer(rows, out.shape[1], self._seed), out.shape, self._table_name)


class _Whole:
    """Makes the whole table once, at the first call, and copies rows out of it."""

    def __init__(
        self, initializer: Callable[..., Any], shape: tuple[int, int], key_seed: int | None, table_name: str
    ) -> None:
        self._initializer, self._shape, self._key_seed, self._table_name = initializer, shape, key_seed, table_name
        self._table: np.ndarray | None = None

    def __call__(self, rows: np.ndarray, out: np.ndarray) -> None:
        if self._table is None:
            self._table = _checked(self._make(), self._shape, self._table_name)
        out[...] = self._table[rows]

    def _make(self) -> Any:
        if self._key_seed is None:
            return self._initializer(self._shape, np.float32)
        import jax  # only such an initializer needs it, and a host worker otherwise never loads it

        return self._initializer(jax.random.key(self._key_seed & 0xFFFFFFFF), self._shape, np.float32)


class _ByShard:
    """Makes the fixed runs of rows that hold the wanted ones, one after another."""

    def __init__(self, initializer: Callable[..., Any], shape: tuple[int, int], table_name: str) -> None:
        self._initializer, self._shape, self._table_name = initializer, shape, table_name

    def __call__(self, rows: np.ndarray, out: np.ndarray) -> None:
        num_rows, dim = self._shape
        shards = rows // ROWS_PER_SHARD
        for shard in np.unique(shards):
            start = int(shard) * ROWS_PER_SHARD
            shape = (min(ROWS_PER_SHARD, num_rows - start), dim)
            made = self._initializer(shape=shape, dtype=np.float32, shard_info=ShardInfo(shape, (start, 0)))
            wanted = shards == shard
            out[wanted] = _checked(made, shape, self._table_name)[rows[wanted] - start]


_40 = np.uint64(40)
# Half the probability within two standard deviations: Phi(2) - 1/2.
_HALF_MASS = 0.4772498680518208
_UNIT = 1.0 / (1 << 24)


@njit(inline="always")
def _unit(key, column):
    """One of 2^24 evenly spaced numbers inside (0, 1)."""
    return (np.int64(finalize(key + np.uint64(column + 1) * GOLDEN_GAMMA) >> _40) + 0.5) * _UNIT


@njit(nogil=True, cache=True, error_model="numpy")
def _fill_uniform(rows, seed, low, high, out):
    for i in range(rows.shape[0]):
        key = finalize(seed ^ finalize(np.uint64(rows[i]) + GOLDEN_GAMMA))
        for column in range(out.shape[1]):
            out[i, column] = np.float32(low + (high - low) * _unit(key, column))


@njit(inline="always")
def _normal_center(q):
    """The z of q = Phi(z) - 1/2 for |z| < 2, as q * P(q²) / Q(q²).

    The coefficients are a minimax fit of ours over that range, error below 1e-7: no logarithm, so every machine gives
    the same bits.
    """
    r = q * q
    upper = 2.506629903 + r * (-24.78127592 + r * (82.71848735 + r * (-101.7790233 + r * 28.9155405)))
    lower = 1.0 + r * (-10.93342704 + r * (42.14417093 + r * (-65.7754053 + r * 32.69264784)))
    return q * upper / lower


_LOG_2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476


@njit(inline="always")
def _log(x):
    """The natural logarithm of x > 0, error below 1e-12. Libraries differ in the last bit, this does not."""
    mantissa, exponent = math.frexp(x)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    r = s * s
    series = 1.0 + r * (1 / 3 + r * (1 / 5 + r * (1 / 7 + r * (1 / 9 + r * (1 / 11 + r * (1 / 13))))))
    return exponent * _LOG_2 + 2.0 * s * series


@njit(inline="always")
def _normal_tail(p):
    """The z > 2 of p = 1 - Phi(z), p >= 2^-25: P(r) / Q(r) of r = sqrt(-2 log p), a fit of ours, error below 1e-7."""
    r = math.sqrt(-2.0 * _log(p))
    upper = -2.605252867 + r * (-0.495638604 + r * (1.809543864 + r * 0.4196538389))
    return upper / (1.0 + r * (1.838612328 + r * 0.4191112391))


@njit(nogil=True, cache=True, error_model="numpy")
def _fill_normal(rows, seed, stddev, mean, out):
    for i in range(rows.shape[0]):
        key = finalize(seed ^ finalize(np.uint64(rows[i]) + GOLDEN_GAMMA))
        for column in range(out.shape[1]):
            unit = _unit(key, column)
            q = unit - 0.5
            if abs(q) < _HALF_MASS:
                z = _normal_center(q)
            else:
                z = math.copysign(_normal_tail(min(unit, 1.0 - unit)), q)
            out[i, column] = np.float32(mean + stddev * z)


@njit(nogil=True, cache=True, error_model="numpy")
def _fill_truncated_normal(rows, seed, stddev, mean, out):
    for i in range(rows.shape[0]):
        key = finalize(seed ^ finalize(np.uint64(rows[i]) + GOLDEN_GAMMA))
        for column in range(out.shape[1]):
            q = (2.0 * _unit(key, column) - 1.0) * _HALF_MASS
            out[i, column] = np.float32(mean + stddev * _normal_center(q))
