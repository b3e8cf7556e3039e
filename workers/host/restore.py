"""How a host's shard comes to hold the rows of a commit: from the hosts that have them in memory, and the rest from the
commit's files.

Which host has what is `workers.host.surviving_shard`' business, and how it gets from one to another that of
`workers.host.moves`; here is the order of things. Buckets move first, since all hosts are there when the mesh is
joined; then each host verifies what it kept, and reads what is still missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from podembed.embedding.table.table import Table
from podembed.workers.checkpoint.shard import TableFiles
from podembed.workers.host.spec import HostSpec
from podembed.workers.host.surviving_shard import Filled, HeldRows
from podembed.workers.liveness.progress import Phase, Tracker
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.storage.store import Store


def fill_shard(
    held: HeldRows,
    tables: Sequence[Table],
    files: Sequence[TableFiles] | None,
    *,
    spec: HostSpec,
    mesh: Mesh,
    store: Store,
    tracker: Tracker,
    check: Callable[[], None],
    neighbours: AbstractSet[int] = frozenset(),
) -> Filled:
    """Fills the tables; all hosts of the mesh call it together.

    Args:
      held: what is here of the commit. Mutated, as the tables are.
      files: of the commit; None for first values.
      check: called between buckets; what it raises ends the work.
      neighbours: ranks on this machine. They are sent nothing if the store is a local folder, whose files the machine
        has in memory: that is faster than a socket (`benchmarks/moves.py`).

    Raises:
      CheckpointMismatch, ChunkDamaged, StorageError: as `read_shard`.
      MeshError: a host is gone or silent.
    """

    def go_on() -> None:
        tracker.mark()
        check()

    def on_round() -> None:
        go_on()
        tracker.point("move.round")

    if files is None:
        for table in tables:
            table.initialize()
            go_on()
        return Filled()
    if spec.num_hosts > 1:
        with tracker.phase(Phase.BUCKET_EXCHANGE):
            held.move(
                mesh,
                store,
                tables,
                files,
                placement=spec.placement,
                timeout_s=spec.step_timeout_s,
                on_round=on_round,
                beside=neighbours if store.is_local else frozenset(),
            )
    filled = held.fill(store, tables, files, on_chunk=go_on)
    return replace(filled, undo_s=tracker.phase_s.get(Phase.UNDO, 0.0))
