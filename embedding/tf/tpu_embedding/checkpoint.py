"""`Checkpoint`: model, optimizer and embedding of a loop of one's own, saved and restored as one.

This module knows what the parts are and how they are taken apart into arrays. Where the arrays lie and what makes them
a checkpoint is the storage's business (`embedding.tf.engine.table_storage`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from podembed.embedding.tf.engine.table_storage import SavedCheckpoint, SavedTable, checkpoint_storage, storage
from podembed.embedding.tf.keras.variable import Variable
from podembed.embedding.tf.replicas.per_replica import PerReplica
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from podembed.embedding.tf.tpu_embedding.serving import TPUEmbeddingForServing
from podembed.embedding.tf.tracing import require_eager

Embedding = TPUEmbedding | TPUEmbeddingForServing
Path = str | os.PathLike[str]

_MOST_SHOWN = 20
_AROUND_IT = "Call it before the function or after it."
_NUMBERS = (bool, int, float)
_DTYPES = "bool, integers, float16, bfloat16, float32 or float64"


class CheckpointPartsMismatch(ValueError):
    """A checkpoint does not hold what it is to be restored into; the message lists every difference."""


class Checkpoint:
    """Parts of a training program that are saved and restored together. Mutable: `restore` replaces what the parts
    hold.

    ```python
    checkpoint = Checkpoint(model=params, optimizer=state, embedding=embedding, step=0)
    checkpoint.model, checkpoint.optimizer, checkpoint.step = params, state, step
    path = checkpoint.save("checkpoints")
    checkpoint.restore(latest_checkpoint("checkpoints"))
    ```

    A part is one of these; its name is that of the argument, and of the attribute that holds it:

    * a `TPUEmbedding`, or one for serving: rows and slots of its tables and the number of steps, on any number of
      hosts; one at most;
    * a `Variable`, or an object with `variables` such as a Keras-style optimizer: assigned in place;
    * any structure that JAX knows (dicts, lists, dataclasses, optax states) of arrays, numbers and `Variable`s: arrays
      and numbers never change. `restore` therefore puts a new structure into the attribute, and a new value has to be
      put there before `save`;
    * a `PerReplica` of such structures, as `strategy.run` returns them, if all replicas have the same values; it is
      restored as one of them.
    """

    def __init__(self, **parts: Any) -> None:
        """Raises:
        ValueError: there is no part, several embeddings, or a name that this class uses itself.
        """
        if not parts:
            raise ValueError(
                "Found a checkpoint without parts. Expected some, such as model=params, embedding=embedding."
            )
        taken = [name for name in parts if name.startswith("_") or hasattr(type(self), name)]
        if taken:
            raise ValueError(
                f"Found parts called {taken}. Expected other names than those of this class's own. Rename them."
            )
        embeddings = [name for name, part in parts.items() if isinstance(part, Embedding)]
        if len(embeddings) > 1:
            raise ValueError(
                f"Found several embeddings: {embeddings}. Expected one, as a strategy has. Save the others alone."
            )
        self._names = tuple(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def __getattr__(self, name: str) -> Any:
        # Only for names that are not there; it also tells type checkers that parts are attributes.
        raise AttributeError(f"This checkpoint has no part '{name}'.")

    def save(self, folder: Path) -> str:
        """Writes a checkpoint of the next number into a folder or below a URL. Returns its path,
        `<folder>/ckpt-<number>`. Threads of a program that save at once do so one after the other.

        Raises: as `write`; AlreadySaved where another program took the number meanwhile.
        """
        with checkpoint_storage().next_path(os.fspath(folder)) as path:
            self.write(path)
        return path

    def write(self, path: Path) -> None:
        """Writes a checkpoint to a new folder or URL. It is there as a whole or not at all, also if the program is
        killed meanwhile.

        Raises:
          TypeError: a part holds something that is no array or number.
          ValueError: replicas have different values, or two places of a part have one name.
          RuntimeError: the embedding is not built, or this is inside a function that JAX traces.
          StorageError: the storage failed, or `path` holds a checkpoint already.
        """
        require_eager("Checkpoint.write", _AROUND_IT)
        target = os.fspath(path)
        checkpoint_storage().require_free(target)
        # Taken before tables are written, so that what cannot be saved shows first.
        arrays = {place.key: place.array() for name in self._names for place in _places(name, self._part(name))}
        embedding = self._embedding
        tables = None if embedding is None else embedding.write_tables(target)
        checkpoint_storage().publish(target, parts=self._names, arrays=arrays, tables=tables)

    def restore(self, path: Path) -> dict[str, Any]:
        """Fills all parts from a checkpoint, written on any number of hosts. Parts of it that are not declared here are
        left out.

        Everything is compared, and all arrays are read and verified, before anything changes. Tables are filled first,
        and the other parts only when that has succeeded.

        Returns:
          The parts by name, as their attributes hold them now.

        Raises:
          CheckpointPartsMismatch: names, shapes or dtypes differ from those of the parts; all of them are listed.
          StorageError: nothing is saved there, or it is damaged.
        """
        require_eager("Checkpoint.restore", _AROUND_IT)
        source = os.fspath(path)
        saved = checkpoint_storage().describe(source)
        places = {name: _places(name, self._part(name)) for name in self._names}
        self._compare(source, saved, places)
        keys = [place.key for of_part in places.values() for place in of_part]
        arrays = checkpoint_storage().read(source, keys)
        if self._embedding is not None:
            self._embedding.restore(source)
        for name, of_part in places.items():
            setattr(self, name, _restored(self._part(name), [place.like(arrays[place.key]) for place in of_part]))
        return {name: self._part(name) for name in self._names}

    @property
    def _embedding(self) -> Embedding | None:
        parts = [self._part(name) for name in self._names]
        return next((part for part in parts if isinstance(part, Embedding)), None)

    def _part(self, name: str) -> Any:
        return self.__dict__[name]

    def _compare(self, path: str, saved: SavedCheckpoint, places: Mapping[str, Sequence[_Place]]) -> None:
        differences = []
        for name in self._names:
            if isinstance(self._part(name), Embedding):
                differences += _table_differences(path, saved, name, self._part(name))
            elif name not in saved.parts:
                differences.append(f"{name}: not in the checkpoint, which has {', '.join(saved.parts)}")
            else:
                differences += _array_differences(saved, name, places[name])
        if differences:
            shown = "\n".join(f"  {one}" for one in differences[:_MOST_SHOWN])
            more = f"\n  and {len(differences) - _MOST_SHOWN} more" if len(differences) > _MOST_SHOWN else ""
            raise CheckpointPartsMismatch(
                f"The checkpoint {path} differs from what it is to be restored into:\n{shown}{more}\nExpected the "
                "parts as they were saved. "
                "Declare them so (build a Keras-style optimizer first), or leave a part out of this Checkpoint to keep "
                "it as it is."
            )


def latest_checkpoint(folder: Path) -> str | None:
    """The path of the last checkpoint that `Checkpoint.save` finished in a folder; None if there is none."""
    return checkpoint_storage().latest_path(os.fspath(folder))


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One array of a part: its name in the checkpoint, and what is there now."""

    key: str
    leaf: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return () if isinstance(self.leaf, _NUMBERS) else tuple(self.leaf.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.asarray(self.leaf).dtype if isinstance(self.leaf, _NUMBERS) else np.dtype(self.leaf.dtype)

    def array(self) -> np.ndarray:
        """The present value."""
        leaf = self.leaf.value if isinstance(self.leaf, Variable) else self.leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"Found a shape without values at '{self.key}'. Expected an array. Put the values there.")
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise ValueError(
                f"Found an array at '{self.key}' of which this process has only a part. Expected whole arrays. Gather "
                "it first."
            )
        return np.asarray(leaf)

    def like(self, array: np.ndarray) -> Any:
        """What was read, in the form of what is there."""
        if isinstance(self.leaf, _NUMBERS):
            return type(self.leaf)(array.item())
        if isinstance(self.leaf, Variable):
            self.leaf.assign(array)
            return self.leaf
        if isinstance(self.leaf, jax.Array) and self.leaf.committed:
            return jax.device_put(array, self.leaf.sharding)
        if isinstance(self.leaf, jax.Array | jax.ShapeDtypeStruct):
            # Bound to no device, as what was there. So it may meet activations that lie on several.
            return jax.numpy.asarray(array)
        return array[()] if isinstance(self.leaf, np.generic) else array


def _places(name: str, part: Any) -> list[_Place]:
    """The arrays of a part in a fixed order.

    Raises:
      TypeError: a leaf is no array or number.
      ValueError: replicas have different values, or two leaves have one name.
    """
    if isinstance(part, Embedding):
        return []
    if isinstance(part, PerReplica):
        return _places_of_replicas(name, part)
    if _has_variables(part):
        named = [(f"{at}/{variable.name}", variable) for at, variable in enumerate(part.variables)]
    else:
        leaves, _ = jax.tree_util.tree_flatten_with_path(part)
        named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
    places = [_Place(f"{name}/{place}" if place else name, leaf) for place, leaf in named]
    keys = [place.key for place in places]
    doubled = sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) < len(keys) else []
    if doubled:
        raise ValueError(
            f"Found several arrays called {doubled}. Expected one name each. Use keys without '/' in part '{name}'."
        )
    for place in places:
        _check_leaf(place)
    return places


def _places_of_replicas(name: str, part: PerReplica) -> list[_Place]:
    first, *others = [_places(name, value) for value in part.values]
    for replica, other in enumerate(others, start=1):
        if [place.key for place in other] != [place.key for place in first]:
            raise ValueError(
                f"Part '{name}' of replica {replica} has another structure than that of replica 0. Expected one."
            )
        for one, same in zip(first, other, strict=True):
            # As bytes, so that a NaN equals itself.
            if one.dtype != same.dtype or one.array().tobytes() != same.array().tobytes():
                raise ValueError(
                    f"Found different values at '{one.key}' of replicas 0 and {replica}. Expected the same on all, "
                    "since one is saved. Sum the gradients over replicas before they are applied, or pass one value."
                )
    return first


def _check_leaf(place: _Place) -> None:
    leaf = place.leaf
    if not isinstance(leaf, Variable | jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | bool | int | float):
        raise TypeError(
            f"Found {type(leaf)} at '{place.key}'. Expected arrays, numbers and Variables, in structures that JAX "
            "knows. Leave it out, or make it an array."
        )
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(f"Found a random key at '{place.key}'. Expected its numbers. Pass jax.random.key_data(key).")
    dtype = place.dtype
    if dtype.kind not in "biu" and dtype not in (np.float16, np.float32, np.float64, jax.numpy.bfloat16):
        raise TypeError(f"Found elements of {dtype} at '{place.key}'. Expected {_DTYPES}. Convert them.")


def _has_variables(part: Any) -> bool:
    if isinstance(part, Variable) or not isinstance(getattr(part, "variables", None), list | tuple):
        return False
    return all(isinstance(one, Variable) for one in part.variables)


def _restored(part: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(part, Embedding) or _has_variables(part):
        return part
    first = part.values[0] if isinstance(part, PerReplica) else part
    if isinstance(part, PerReplica) and _has_variables(first):
        return first
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(first), leaves)


def _array_differences(saved: SavedCheckpoint, name: str, places: Sequence[_Place]) -> list[str]:
    found = {key: entry for key, entry in saved.arrays.items() if key == name or key.startswith(f"{name}/")}
    differences = []
    for place in places:
        if place.key not in found:
            differences.append(f"{place.key}: not in the checkpoint")
            continue
        shape, dtype = found.pop(place.key)
        if shape != place.shape or dtype != place.dtype:
            differences.append(
                f"{place.key}: {dtype}{list(shape)} in the checkpoint, {place.dtype}{list(place.shape)} here"
            )
    return differences + [f"{key}: in the checkpoint alone" for key in found]


def _table_differences(path: str, saved: SavedCheckpoint, name: str, embedding: Embedding) -> list[str]:
    if not saved.has_embedding:
        return [f"{name}: the checkpoint has no embedding"]
    tables = {table.name: table for table in storage().describe(path)}
    differences = []
    for spec in embedding.declared_specs:
        table: SavedTable | None = tables.get(spec.name)
        expected = spec.stored_widths
        if table is None:
            differences.append(f"{name}: no table '{spec.name}' in the checkpoint, which has {sorted(tables)}")
        elif table.num_rows != spec.num_rows or any(table.widths.get(one) != width for one, width in expected.items()):
            differences.append(
                f"{name}: table '{spec.name}' with {table.num_rows} rows and columns {table.widths} in the checkpoint, "
                f"with {spec.num_rows} rows and columns {expected} here"
            )
    return differences
