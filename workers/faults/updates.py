"""Faults between the updates of two tables and in the middle of one, for hosts whose plan asks for them.

Tables know nothing of faults: where a plan has such a point, the update methods of this host's tables are wrapped.
Otherwise they are what they always are. The middle of an update is made by updating half of the rows and then striking;
no state that anybody keeps comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podembed.embedding.table.table import Table
from podembed.workers.faults.inject import FaultPoints

BETWEEN, MID = "step.update.between", "step.update.mid"


def arm_updates(tables: Sequence[Table], faults: FaultPoints | None, step_of: Callable[[], int]) -> None:
    """Wraps the update methods of the tables if a fault may strike there.

    Args:
      step_of: the step that the host works on.
    """
    if faults is None or not faults.knows("step.update."):
        return
    for table in tables:
        # Of the class, since a survivor brings along tables that were armed in the generation before.
        update, begin_update = Table.update.__get__(table), Table.begin_update.__get__(table)
        table.update = _armed(table, update, faults, step_of)  # type: ignore[method-assign]
        table.begin_update = _armed(table, begin_update, faults, step_of)  # type: ignore[method-assign]
        # So that a fault between two tables finds one of them updated.
        table.updates_alone = True


def _armed(table: Table, update: Callable[..., None], faults: FaultPoints, step_of: Callable[[], int]) -> Any:
    name = table.spec.name

    def update_with_faults(*arguments: Any) -> None:
        step = step_of()
        faults.hit(BETWEEN, step=step, detail=name)
        fault = faults.hit(MID, step=step, detail=name, acts=False)
        if fault is not None:
            _half_update(table, arguments)
            faults.act(fault)
            raise RuntimeError(
                f"Found the fault {fault.action} in the middle of an update survived. Expected kill or raise."
            )
        update(*arguments)

    return update_with_faults


def _half_update(table: Table, arguments: Sequence[Any]) -> None:
    """Changes half of the rows that an update is about to change, after the copies that an update makes of them."""
    rows = arguments[0].rows if hasattr(arguments[0], "rows") else arguments[0]
    local = np.unique(np.concatenate([np.atleast_1d(np.asarray(part, np.int64)) for part in _parts(rows)]))
    if table.before_change is not None:
        table.before_change(local)
    half = local[: -(-len(local) // 2)]
    table.store.write(half, {name: values + np.float32(1.0) for name, values in table.store.read(half).items()})


def _parts(rows: Any) -> Sequence[np.ndarray]:
    return [rows] if isinstance(rows, np.ndarray) else list(rows)
