"""`ItemColumns`: which items a server recommends among, by their keys, and what it knows of each: columns of the model,
and columns to filter by.

They come from a Parquet file, or are all that a feature of the model can name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.server.replica import ServedVersion
from podembed.serving.server.rows import RowsByKey
from podembed.workers.data.files import read_whole

Value = str | int | float | bool | None


class ItemColumns:
    """Items in a fixed order; a place is a number in it. Mutated: what lookups and filters keep of a column.

    Args:
      table: a row for each item.
      key: column of the keys, integers or texts, each once.
      source: what the table was read from, for messages.

    Attributes:
      key, source: as given.

    Raises:
      ConfigurationError: the keys are none.
    """

    def __init__(self, table: pa.Table, key: str, source: str) -> None:
        found = table.column(key)
        kind = found.type.value_type if pa.types.is_dictionary(found.type) else found.type
        has_texts = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not (has_texts or pa.types.is_integer(kind)):
            raise ConfigurationError(
                f"Found {found.type} in column {key!r} of {source}. Expected the keys of items, integers or texts. "
                "Name their column: --recommend FEATURE."
            )
        try:
            keys = found.cast(pa.large_string() if has_texts else pa.int64()).combine_chunks()
        except pa.ArrowInvalid as error:
            raise ConfigurationError(
                f"Found a key of {source} that is no integer of 64 bits ({error}). Expected such. Correct the column."
            ) from error
        if keys.null_count or len(keys.unique()) != len(keys):
            raise ConfigurationError(
                f"Found {len(keys):,} rows with {len(keys.drop_null().unique()):,} keys in column {key!r} of {source}. "
                "Expected each key once, and none missing. Keep one row of each item."
            )
        self.key, self._keys, self._table, self.source = key, keys, table, source
        self._codes: dict[str, tuple[np.ndarray, np.ndarray | None, dict[tuple[bool, Value], int]]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> list[str]:
        """All columns."""
        return self._table.column_names

    @staticmethod
    def read(path: str, key: str | None) -> ItemColumns:
        """Reads a Parquet file.

        Args:
          key: column of the keys; None for the first one.

        Raises:
          ConfigurationError: it is no Parquet, or has no such keys.
          InputError: there is no such file, or it may not be read.
        """
        try:
            table = pq.read_table(pa.BufferReader(read_whole(path)))
        except (OSError, pa.ArrowException) as error:
            raise ConfigurationError(
                f"Found no way to read {path} ({error}). Expected a Parquet file with a row for each item. Correct "
                "--items."
            ) from error
        key = key or next(iter(table.column_names), "")
        if key not in table.column_names or not len(table):
            raise ConfigurationError(
                f"Found {len(table)} rows with columns {table.column_names} in {path}. Expected a row for each item, "
                f"with its key in column {key!r}. Add them."
            )
        return ItemColumns(table, key, path)

    @staticmethod
    def of_feature(version: ServedVersion, name: str) -> ItemColumns:
        """All items that a feature can name: its vocabulary, the keys that have a row, or the row numbers of its table.

        Raises:
          ConfigurationError: values become rows in a way that has no way back.
        """
        manifest = version.model.manifest
        feature = feature_of(version, name)
        is_plain = not (feature["crossed_with"] or feature["boundaries"] or feature["weights"] or feature["unit"])
        # Of texts a key is the hash.
        has_numbers = feature["mode"] == "as_is" and feature["holds"] in (None, "integers")
        described = manifest["tables"][feature["table"]]
        table = version.tables[described["name"]]
        if feature["vocabulary"] is not None and is_plain:
            keys = pa.array(version.model.lines_of(feature["vocabulary"]), pa.large_string())
        elif isinstance(table, RowsByKey) and has_numbers and is_plain:
            keys = pa.array(table.held_keys())
        elif not (has_numbers and is_plain) or described["keys"] is not None:
            raise ConfigurationError(
                f"Found feature {name!r}, whose values this process cannot list: they are hashed, or shards have its "
                "keys. Expected items to recommend. Pass a file with all of them: --items FILE."
            )
        else:
            keys = pa.array(np.arange(described["num_rows"]))
        return ItemColumns(pa.table({feature["column"]: keys}), feature["column"], f"feature {name!r}")

    def keys(self, places: np.ndarray) -> list[str | int]:
        """The keys at some places."""
        return self._keys.take(pa.array(places)).to_pylist()

    def columns(self, places: np.ndarray | None, names: Sequence[str]) -> dict[str, list[Any]]:
        """Values of some columns at some places; at all without any."""
        table = self._table.select(list(names))
        return (table if places is None else table.take(pa.array(places))).to_pydict()

    def places(self, keys: Sequence[Any]) -> np.ndarray:
        """int64, where the items of some keys are; -1 for keys of none. An integer and its digits are one key."""
        if isinstance(self._lookup, dict):
            found = [self._lookup.get(str(key), -1) if type(key) in (str, int) else -1 for key in keys]
            return np.array(found, np.int64)
        ordered, order = self._lookup
        numbers = [_integer(key) for key in keys]
        known = [at for at, number in enumerate(numbers) if number is not None]
        wanted = np.array([numbers[at] for at in known], np.int64)
        at = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
        found = np.full(len(numbers), -1, np.int64)
        found[known] = np.where(ordered[at] == wanted, order[at], -1)
        return found

    @cached_property
    def _lookup(self) -> dict[str, int] | tuple[np.ndarray, np.ndarray]:
        if not pa.types.is_integer(self._keys.type):
            return {key: at for at, key in enumerate(self._keys.to_pylist())}
        keys = self._keys.to_numpy()
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def filled(self, columns: Mapping[str, Any], needed: Sequence[str]) -> Mapping[str, Any]:
        """Columns of a request; those of the items that it leaves out are added by their keys.

        Args:
          columns: a value each sample, or one for all.
          needed: columns of the model.

        Raises:
          ModelError: a key is none of the items'.
        """
        missing = [name for name in needed if name not in columns and name in self.names]
        if not missing or self.key not in columns:
            return columns
        given = columns[self.key]
        keys = given.tolist() if isinstance(given, np.ndarray) else list(given)
        # An item may be a bag of one key.
        keys = [key[0] if type(key) is list and len(key) == 1 else key for key in keys]
        places = self.places(keys)
        if (places < 0).any():
            raise ModelError(
                f"Found {self.key} {keys[int(np.argmin(places))]!r:.80}, which is not in {self.source}, without "
                f"{missing}. Expected an item of it. Send its other columns, too, or add it to the file."
            )
        return {**columns, **self.columns(places, missing)}

    def allowed(self, conditions: Mapping[str, Sequence[Value]]) -> np.ndarray | None:
        """bool, which items fulfil all conditions; None without any.

        Args:
          conditions: values by column, one of which an item must have; of a list it is enough if one item is among
            them.

        Raises:
          ModelError: there is no such column, or none that can be compared.
        """
        found = None
        for name, values in conditions.items():
            if name not in self.names:
                raise ModelError(
                    f"Found a filter by {name!r:.80}. Expected a column of items, one of {self.names}. Name one of "
                    "these, or add it to the file of --items."
                )
            fulfils = self._with(name, values)
            found = fulfils if found is None else found & fulfils
        return found

    def _with(self, name: str, values: Sequence[Value]) -> np.ndarray:
        fulfils = np.zeros(len(self), bool)
        if name == self.key:
            places = self.places(values)
            fulfils[places[places >= 0]] = True
            return fulfils
        if name not in self._codes:
            self._codes[name] = self._coded(name)
        codes, owners, numbers = self._codes[name]
        wanted = [numbers.get((type(value) is bool, value), -1) for value in values]
        is_wanted = np.zeros(len(numbers) + 1, bool)
        is_wanted[wanted] = True
        is_wanted[-1] = False
        hits = is_wanted[codes]
        if owners is None:
            return hits
        fulfils[owners[hits]] = True
        return fulfils

    def _coded(self, name: str) -> tuple[np.ndarray, np.ndarray | None, dict[tuple[bool, Value], int]]:
        """A number for each value of a column, whose items they are where there are lists, and the values' numbers."""
        values, owners = self._table.column(name).combine_chunks(), None
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            lengths = values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
            values, owners = values.flatten(), np.repeat(np.arange(len(self)), lengths)
        kind = values.type
        if not any(
            test(kind) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
        ) and not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ModelError(
                f"Found a filter by {name!r:.80}, which has {kind}. Expected texts, numbers or truth values. Filter by "
                "another column."
            )
        coded = values.dictionary_encode(null_encoding="encode")
        numbers = {(type(value) is bool, value): at for at, value in enumerate(coded.dictionary.to_pylist())}
        return coded.indices.to_numpy(), owners, numbers


def feature_of(version: ServedVersion, name: str) -> Mapping[str, Any]:
    """What the schema of a version says of a feature.

    Raises:
      ConfigurationError: there is none of this name that the model reads.
    """
    features = {one["name"]: one for one in version.model.manifest["features"]}
    if name not in features:
        raise ConfigurationError(
            f"Found --recommend {name}. Expected a feature of the model, one of {list(features)}. Name the feature of "
            "the items."
        )
    return features[name]


def _integer(key: Any) -> int | None:
    if type(key) is str and key.lstrip("-").isdecimal() and key.isascii():
        key = int(key[:40])
    return key if type(key) is int and -(1 << 63) <= key < 1 << 63 else None
