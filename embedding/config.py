"""What the user declares: tables, features that look up in them, and the quantization of looked-up values.

The classes keep the names, argument order, defaults and checks of `tf.tpu.experimental.embedding`. Their identity
counts, as there: sharing a table means passing the same object. `TPUEmbedding` writes defaults (optimizer, name) into
the objects it is given. Nothing here allocates rows; `table_spec.py` turns a declared table into what a host holds.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from podembed.embedding.initializers import GivenRows, TruncatedNormal, fills_single_rows
from podembed.embedding.initializers import RowId as RowIdInitializer
from podembed.embedding.optimizers import Optimizer, is_number
from podembed.embedding.row_index import DenseKeys, KeySpace
from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.embedding.vocabulary.policies import DEFAULTS, Admit, Always, Evict, Never

COMBINERS = ("mean", "sum", "sqrtn")
INVALID_IDS = ("error", "drop", "clip", "hash")
PLACES = ("host", "replicated", "sharded", "device", "auto")
"""`device` is the old name of `replicated`."""

__all__ = ["COMBINERS", "INVALID_IDS", "FeatureConfig", "QuantizationConfig", "RowIdInitializer", "TableConfig"]


_INTEGERS = {
    "vocabulary_size": "Pass the number of rows of the table.",
    "dim": "Pass the number of columns of a row, such as 16.",
    "max_sequence_length": "Pass how many rows of a sample stay apart, or 0 to combine them.",
    "num_buckets": "Pass the number of levels, such as 256.",
    "capacity": "Pass the number of keys for which there is room.",
    "forget_after": "Pass a number of steps.",
    "waiting": "Pass the number of keys that may wait.",
}


def _positive_int(name: str, value: object, *, least: int = 1) -> int:
    if isinstance(value, int) and value >= least:
        return value
    remedy = _INTEGERS[name]
    if isinstance(value, np.integer) and value >= least:
        remedy = f"Pass int({name})."
    raise ValueError(f"Found {name}={value!r}. Expected a Python int of at least {least}. {remedy}")


def _one_of(name: str, value: object, allowed: Sequence[str]) -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"Found {name}={value!r}. Expected one of {', '.join(map(repr, allowed))}. Write it exactly so."
        )
    return value


def _optional_name(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"Found name={value!r}. Expected a string or None. Pass str(name).")
    return value


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Simulated quantization of looked-up values, before the combiner; the stored table stays float32.

    Raises:
      ValueError: fewer than 2 buckets, or limits that are not increasing finite numbers.
    """

    num_buckets: int
    lower: float
    upper: float

    def __post_init__(self) -> None:
        _positive_int("num_buckets", self.num_buckets, least=2)
        are_numbers = is_number(self.lower) and is_number(self.upper)
        if not are_numbers or not -math.inf < self.lower < self.upper < math.inf:
            raise ValueError(
                f"Found lower={self.lower!r} and upper={self.upper!r}. Expected two finite numbers, lower below upper. "
                "Swap or widen the limits."
            )

    def apply(self, rows: np.ndarray) -> None:
        """Rounds float32 `rows` in place to the nearest of `num_buckets` levels from `lower` to `upper`."""
        lower = np.float32(self.lower)
        step = np.float32((self.upper - self.lower) / (self.num_buckets - 1))
        np.clip(rows, lower, np.float32(self.upper), out=rows)
        rows -= lower
        rows /= step
        rows += np.float32(0.5)
        np.floor(rows, out=rows)
        rows *= step
        rows += lower


_NOT_GIVEN: Any = object()


class TableConfig:
    """One embedding table: how many rows, how wide, how they start and how they are trained.

    Args:
      vocabulary_size: number of rows, where ids are the numbers of rows.
      dim: columns of a row.
      initializer: None for a truncated normal with standard deviation 1/sqrt(dim), or any callable
        `embedding.initializers` understands.
      optimizer: how rows are updated; None takes the global optimizer of the job. Checked when the table is built, not
        here.
      combiner: "mean", "sum" or "sqrtn", how the rows of one sample become one vector.
      name: of the table in checkpoints and messages; None takes its position.
      quantization_config: simulated quantization of looked-up values, or None.
      layout: kept for callers that set it. Rows are placed by buckets, whatever it says.
      dtype: float32; int32 is a legal declaration, but such a table cannot be trained here and is refused when it is
        built.
      invalid_ids: what happens to ids outside `0..vocabulary_size - 1`: "error", "drop", "clip" to the range, or "hash"
        into it.
      initial_rows: the first values, in the place of an initializer: an array `[vocabulary_size, dim]` of floating
        point, or its path or URL. A file is `.npy`, or safetensors with one tensor, and is for a `Trainer`.
      trainable: whether rows are updated. A table that is not has no slots, and gets no gradients. For a `Trainer`.
      place: where rows live while they are trained. With "host" each host has a part. Otherwise compiled programs look
        them up and update them on the devices. With "replicated" each device has all, for tables of up to a few million
        rows and a `Trainer`. With "sharded" each device of each host has a part; a `TPUEmbedding` takes it in the scope
        of a `LocalStrategy`. Commits are the same, so a run may change it when it resumes. "device" is another name of
        "replicated". With "auto" the table is cut over TPUs or GPUs if it fits there, and lies on hosts otherwise.
      capacity: instead of `vocabulary_size`, room for so many keys that come and go. Any 64-bit integer or text is a
        key then, and gets its row when it is admitted.
      keys: "any" with `capacity` and "rows" without; may be left out.
      admit: which keys get a row: `Always()`, `MinCount(k)` or `Probability(p)`.
      evict: which keys lose theirs when there is no room: `Never()`, `LeastRecent()`, `LeastFrequent(half_life)` or
        `SmallNorm()`.
      forget_after: steps after which a key that nobody names is forgotten, at the latest a sixteenth later.
      waiting: keys without a row whose occurrences are remembered; with `MinCount` as many as there are rows.
      default: what a key without a row is looked up as: "first", the value that its row would begin with; "zeros"; or
        "shared", a row that the keys without one train together.

    Raises:
      ValueError: an argument outside its range, see the message.
    """

    def __init__(
        self,
        vocabulary_size: int | None = _NOT_GIVEN,
        dim: int = _NOT_GIVEN,
        initializer: Callable[..., Any] | None = None,
        optimizer: Optimizer | None = None,
        combiner: str = "mean",
        name: str | None = None,
        quantization_config: QuantizationConfig | None = None,
        layout: Any = None,
        dtype: DTypeLike = np.float32,
        *,
        capacity: int | None = None,
        keys: Literal["rows", "any"] | None = None,
        admit: Admit | None = None,
        evict: Evict | None = None,
        forget_after: int | None = None,
        waiting: int | None = None,
        default: Literal["first", "zeros", "shared"] | None = None,
        invalid_ids: Literal["error", "drop", "clip", "hash"] = "error",
        initial_rows: Any = None,
        trainable: bool = True,
        place: Literal["host", "replicated", "sharded", "device", "auto"] = "host",
    ) -> None:
        self.dynamic_keys = _dynamic_keys(
            None if vocabulary_size is _NOT_GIVEN else vocabulary_size,
            capacity,
            keys,
            admit,
            evict,
            forget_after=forget_after,
            waiting=waiting,
            default=default,
        )
        _require_given(vocabulary_size=vocabulary_size if self.dynamic_keys is None else None, dim=dim)
        self.dim = _positive_int("dim", dim)
        self.vocabulary_size = (
            _positive_int("vocabulary_size", vocabulary_size)
            if self.dynamic_keys is None
            else self.dynamic_keys.capacity
        )
        if initializer is not None and not callable(initializer):
            raise ValueError(
                f"Found initializer={initializer!r}. Expected a callable or None. Pass Constant(x) for one value."
            )
        self.initializer = TruncatedNormal(stddev=1 / math.sqrt(dim)) if initializer is None else initializer
        if initial_rows is not None and initializer is not None:
            raise ValueError(
                f"Found initial_rows beside initializer={initializer!r}. Expected one of them. Leave the other out."
            )
        self.initial_rows_path: str | None = None
        if isinstance(initial_rows, str | os.PathLike):
            self.initial_rows_path = os.fspath(initial_rows)
        elif initial_rows is not None:
            self.initializer = GivenRows(_checked_rows(initial_rows, (self.vocabulary_size, dim)))
        if not isinstance(trainable, bool):
            raise ValueError(f"Found trainable={trainable!r}. Expected True or False. Pass a bool.")
        self.trainable = trainable
        self.place: str = "replicated" if _one_of("place", place, PLACES) == "device" else place
        # Set by `auto_places`' callers, who write their choice into `place`.
        self.place_reason = ""
        self.optimizer = optimizer
        # Set by a TPUEmbedding that has written its own optimizer in, so that another one is not taken to have declared
        # it.
        self.has_default_optimizer = False
        self.combiner: str = _one_of("combiner", combiner, COMBINERS)
        self.name = _optional_name(name)
        if quantization_config is not None and not isinstance(quantization_config, QuantizationConfig):
            raise ValueError(
                f"Found quantization_config={quantization_config!r}. Expected a QuantizationConfig or None. Build one."
            )
        self.quantization_config = quantization_config
        self.layout = layout
        if self.dynamic_keys is not None:
            self._check_dynamic(place, invalid_ids, initial_rows)
        self.dtype = _table_dtype(dtype)
        self.invalid_ids: str = _one_of("invalid_ids", invalid_ids, INVALID_IDS)
        # As `TableSpec.stores`. To be set by whoever brings stores of another kind.
        self.stores: Any = None

    @property
    def is_on_devices(self) -> bool:
        """Whether its rows live on devices. Until somebody who knows the devices has chosen, "auto" means hosts."""
        return self.place not in ("host", "auto")

    @property
    def is_sharded(self) -> bool:
        """Whether each device has a part of it."""
        return self.place == "sharded"

    @property
    def key_space(self) -> KeySpace:
        """What ids are: the numbers of rows, or, with a capacity, anything. A subclass may have others, and an index
        that finds their rows.
        """
        return DenseKeys() if self.dynamic_keys is None else self.dynamic_keys

    def _check_dynamic(self, place: str, invalid_ids: str, initial_rows: Any) -> None:
        """Refuses what does not go with keys that come and go."""
        found = [
            (
                self.is_on_devices,
                f"place={place!r}",
                "place='host', since hosts decide which keys have a row",
            ),
            (invalid_ids != "error", f"invalid_ids={invalid_ids!r}", "none, since every id is a key"),
            (initial_rows is not None, "initial_rows", "an initializer, since rows come with their keys"),
            (
                not fills_single_rows(self.initializer, self.name or "of this declaration"),
                f"initializer={self.initializer!r}",
                "one of (rows, dim, seed), since rows come one by one with any key for a number",
            ),
        ]
        for is_refused, what, expected in found:
            if is_refused:
                raise ValueError(f"Found {what} beside capacity. Expected {expected}. Leave one of them out.")

    def __repr__(self) -> str:
        default = TruncatedNormal(stddev=1 / math.sqrt(self.dim))
        initializer = None if self.initializer == default else self.initializer
        keys = self.dynamic_keys
        size = (
            f"vocabulary_size={self.vocabulary_size!r}"
            if keys is None
            else f"capacity={keys.capacity!r}, admit={keys.admit!r}, evict={keys.evict!r}, "
            f"forget_after={keys.forget_after!r}, waiting={keys.waiting!r}, default={keys.default!r}"
        )
        return (
            f"TableConfig({size}, dim={self.dim!r}, initializer={initializer!r}, "
            f"optimizer={self.optimizer!r}, combiner={self.combiner!r}, name={self.name!r}, "
            f"quantization_config={self.quantization_config!r})"
        )


def _require_given(**arguments: Any) -> None:
    """Says what Python says of arguments without a default, which these are but beside `capacity`."""
    missing = [repr(name) for name, value in arguments.items() if value is _NOT_GIVEN]
    if missing:
        raise TypeError(
            f"TableConfig.__init__() missing {len(missing)} required positional "
            f"argument{'s' if len(missing) > 1 else ''}: {' and '.join(missing)}"
        )


def _dynamic_keys(
    vocabulary_size: int | None,
    capacity: int | None,
    keys: str | None,
    admit: Admit | None,
    evict: Evict | None,
    **others: Any,
) -> DynamicKeys | None:
    """The key space of a table with a capacity; None of one with a vocabulary size."""
    given = {"admit": admit, "evict": evict} | others
    if capacity is None:
        named = [name for name, value in given.items() if value is not None] + (["keys"] if keys == "any" else [])
        if named:
            raise ValueError(
                f"Found {', '.join(named)} without capacity. Expected capacity=..., the number of keys for which there "
                "is room. Pass it in the place of vocabulary_size, or leave the others out."
            )
        if keys is not None:
            _one_of("keys", keys, ("rows", "any"))
        return None
    if vocabulary_size is not None or keys == "rows":
        other = f"vocabulary_size={vocabulary_size!r}" if vocabulary_size is not None else "keys='rows'"
        raise ValueError(
            f"Found capacity={capacity!r} beside {other}. Expected one of them: vocabulary_size where ids are the "
            "numbers of rows, capacity where any number or text is a key. Leave the other out."
        )
    if keys is not None:
        _one_of("keys", keys, ("any",))
    for name, value, kinds in (("admit", admit, Admit), ("evict", evict, Evict)):
        if value is not None and not isinstance(value, kinds):
            names = ", ".join(kind.__name__ for kind in kinds.__args__)
            raise ValueError(f"Found {name}={value!r}. Expected one of {names}. Pass one with its arguments.")
    for name, least in (("forget_after", 1), ("waiting", 0)):
        if others[name] is not None:
            _positive_int(name, others[name], least=least)
    default = others["default"]
    return DynamicKeys(
        capacity=_positive_int("capacity", capacity),
        admit=admit or Always(),
        evict=evict or Never(),
        forget_after=others["forget_after"],
        waiting=others["waiting"],
        default="first" if default is None else _one_of("default", default, DEFAULTS),
    )


def _checked_rows(rows: Any, shape: tuple[int, int]) -> np.ndarray:
    """float32 `shape`."""
    # A class has no values. What numpy makes of other objects is an array of objects.
    array = np.asarray(rows)
    is_floating = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    if array.shape != shape or not is_floating:
        raise ValueError(
            f"Found initial_rows of shape {list(array.shape)} of {array.dtype}. Expected {list(shape)} of floating "
            "point, or the path of such a file. Pass one row for each row of the table."
        )
    with np.errstate(over="ignore"):
        values = array.astype(np.float32, copy=False)
    wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(wrong):
        raise ValueError(
            f"Found a value that is not finite in row {wrong[0]} of initial_rows. Expected numbers that float32 holds. "
            "Mend the array."
        )
    return values


def _table_dtype(dtype: DTypeLike) -> np.dtype:
    for allowed in (np.dtype(np.float32), np.dtype(np.int32)):
        try:
            if np.dtype(dtype) == allowed:
                return allowed
        except TypeError:
            break
    raise ValueError(f"Found dtype={dtype!r}. Expected float32 or int32. Leave dtype out for float32.")


class FeatureConfig:
    """One input that looks up in a table.

    Args:
      table: the `TableConfig`; features that share a table pass the same object.
      max_sequence_length: 0 combines the rows of a sample; L > 0 keeps up to L rows of each sample apart, padded with
        zero vectors. It has no effect beside `output_shape`, nor for inputs of rank 3 and above, where the last axis
        is combined whatever its length.
      validate_weights_and_indices: whether serving drops negative ids and non-positive weights.
      output_shape: shape of the feature's activations without the last axis, None where unknown; an int is a shape of
        one axis. An open first axis is the batch, whose size the job or `TPUEmbedding(batch_size=...)` has. Not empty,
        it switches `max_sequence_length` off.
      name: of the feature in messages.
      combiner: overrides the table's combiner for this feature; None keeps it.

    Raises:
      ValueError: an argument outside its range, see the message.
      TypeError: `output_shape` holds something else than integers and None.
    """

    def __init__(
        self,
        table: TableConfig,
        max_sequence_length: int = 0,
        validate_weights_and_indices: bool = True,
        output_shape: int | Iterable[int | None] | None = None,
        name: str | None = None,
        *,
        combiner: str | None = None,
    ) -> None:
        if not isinstance(table, TableConfig):
            raise ValueError(f"Found table={table!r}. Expected a TableConfig. Pass the object that declares the table.")
        self.table = table
        self.max_sequence_length = _positive_int("max_sequence_length", max_sequence_length, least=0)
        if not isinstance(validate_weights_and_indices, bool):
            raise ValueError(
                f"Found validate_weights_and_indices={validate_weights_and_indices!r}. Expected True or False. Pass a "
                "bool."
            )
        self.validate_weights_and_indices = validate_weights_and_indices
        self.output_shape = _checked_shape(output_shape)
        self.name = _optional_name(name)
        self._combiner = None if combiner is None else _one_of("combiner", combiner, COMBINERS)

    @property
    def combiner(self) -> str:
        """The feature's own combiner, otherwise the table's."""
        return self._combiner or self.table.combiner

    @property
    def is_sequence(self) -> bool:
        """Whether the rows of a sample are kept apart up to `max_sequence_length`."""
        return not self.output_shape and self.max_sequence_length > 0

    def __repr__(self) -> str:
        own_combiner = f", combiner={self._combiner!r}" if self._combiner else ""
        return (
            f"FeatureConfig(table={self.table!r}, max_sequence_length={self.max_sequence_length!r}, "
            f"validate_weights_and_indices={self.validate_weights_and_indices!r}, output_shape={self.output_shape!r}, "
            f"name={self.name!r}{own_combiner})"
        )


def _checked_shape(output_shape: int | Iterable[int | None] | None) -> tuple[int | None, ...]:
    if output_shape is None:
        return ()
    sizes = output_shape if isinstance(output_shape, Iterable) else (output_shape,)
    try:
        shape = tuple(None if size is None else operator.index(size) for size in sizes)
    except TypeError as error:
        raise TypeError(
            f"Found output_shape={output_shape!r}. Expected integers, None for unknown ones. Pass a tuple such as "
            "(None, 8)."
        ) from error
    if any(size is not None and size < 0 for size in shape):
        raise ValueError(f"Found output_shape={shape}. Expected sizes of at least 0. Pass None for an unknown one.")
    return shape
