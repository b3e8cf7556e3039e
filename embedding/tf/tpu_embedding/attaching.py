"""An embedding that uses the engine of another one must declare what that engine was started with; otherwise it would
train something else.

Everything that decides numbers is compared: tables, features, optimizers, batch. Not compared: initializers and
`slot_variable_creation_fn`, since the engine consumed them at its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from podembed.embedding.optimizers import Optimizer
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.engine.engine import EngineSpec

_ABSENT = "none"


def require_same_configuration(own: EngineSpec, running: EngineSpec) -> None:
    """Raises ValueError that lists every difference.

    Args:
      own: what the embedding declares. Output shapes are not compared where it does not know them yet.
      running: what the engine was started with.
    """
    found = list(differences(own, running))
    if found:
        raise ValueError(
            "Found initialize_tpu_embedding=False with another configuration than that of the running engine: "
            f"{'; '.join(found)}. Expected the same one, since the tables, their optimizers and the batch are the "
            "engine's. Declare the same, or "
            "close the other embedding and make this one without initialize_tpu_embedding=False."
        )


def differences(own: EngineSpec, running: EngineSpec) -> Iterator[str]:
    """One clause for each thing that differs."""
    ours, theirs = _described(own), _described(running)
    for what in dict.fromkeys((*ours, *theirs)):
        here, there = ours.get(what, _ABSENT), theirs.get(what, _ABSENT)
        if here == there or (what.startswith("output shape") and not own.output_shapes):
            continue
        if isinstance(here, Optimizer) and type(here) is type(there):
            yield from _of_optimizers(what, here, there)
        else:
            yield f"{what} is {_shown(here)} here and {_shown(there)} in the engine"


def _described(spec: EngineSpec) -> dict[str, Any]:
    """What is compared, by the words for it."""
    names = [table.name for table in spec.tables]
    found: dict[str, Any] = {"the order of tables": names, "the order of features": list(spec.paths)}
    rows = zip(spec.tables, spec.quantization, spec.learning_rates, spec.invalid_ids, strict=True)
    for table, quantization, rate, invalid_ids in rows:
        found |= _of_table(table)
        found[f"learning_rate of table '{table.name}'"] = "a callable" if rate is None else rate
        found[f"quantization_config of table '{table.name}'"] = quantization
        found[f"invalid_ids of table '{table.name}'"] = invalid_ids
    for path, feature, positions in zip(spec.paths, spec.features, spec.positions, strict=True):
        found[f"table of feature '{path}'"] = names[feature.table]
        found[f"combiner of feature '{path}'"] = feature.combiner
        found[f"max_sequence_length of feature '{path}'"] = positions
    found |= {
        f"output shape of feature '{path}'": tuple(shape)
        for path, shape in zip(spec.paths, spec.output_shapes, strict=False)
    }
    found["pipeline_execution_with_tensor_core"] = spec.is_pipelined
    return found


def _of_table(table: TableSpec) -> dict[str, Any]:
    return {
        f"vocabulary_size of table '{table.name}'": table.num_rows,
        f"keys of table '{table.name}'": table.keys,
        f"dim of table '{table.name}'": table.dim,
        f"combiner of table '{table.name}'": table.combiner,
        f"place of table '{table.name}'": "sharded" if table.is_sharded else "host",
        f"optimizer of table '{table.name}'": table.optimizer,
    }


def _of_optimizers(what: str, own: Optimizer, running: Any) -> Iterator[str]:
    for field in fields(own):  # pyright: ignore[reportArgumentType]  # its subclasses are dataclasses
        here, there = getattr(own, field.name), getattr(running, field.name)
        if field.compare and here != there:
            yield f"{field.name} of the {what} is {here!r} here and {there!r} in the engine"


def _shown(value: Any) -> str:
    # The rate of an optimizer in a spec stands for nothing, so its repr would mislead.
    return type(value).__name__ if isinstance(value, Optimizer) else repr(value) if value != _ABSENT else _ABSENT
