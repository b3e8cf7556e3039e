"""The ways in which bytes between hosts can fail, as types with fields.

Every error keeps its fields as positional arguments. It therefore survives the trip through Ray to the driver
unchanged, and builds its sentence when it is printed. `MeshUsageError` is a mistake of the calling code and leaves the
mesh as it was; every other error ends the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class MeshError(Exception):
    """Base of everything that ends a mesh."""


class MeshUsageError(ValueError):
    """The caller passed something the mesh cannot carry, or called out of order."""


class MeshConnectTimeout(MeshError):
    """Not all hosts were connected in time.

    Attributes:
      missing: ranks without a connection, ascending.
      timeout_s: how long they were waited for.
      problems: last thing that went wrong with a missing rank, where anything did.
      refused: the last connections that were not let in, one line each; a missing host may be among them.
    """

    def __init__(
        self, missing: Sequence[int], timeout_s: float, problems: Mapping[int, str], refused: Sequence[str] = ()
    ) -> None:
        super().__init__(tuple(missing), timeout_s, dict(problems), tuple(refused))
        self.missing = tuple(missing)
        self.timeout_s = timeout_s
        self.problems = dict(problems)
        self.refused = tuple(refused)

    def __str__(self) -> str:
        details = "".join(f" Rank {rank}: {problem}." for rank, problem in sorted(self.problems.items()))
        details += "".join(f" Refused {line}." for line in self.refused)
        return (
            f"Found no connection to ranks {list(self.missing)} after {self.timeout_s:.1f} s. Expected every host of "
            f"the generation to connect.{details} Check that these hosts run and that their data ports are reachable."
        )


class HandshakeRefused(MeshError):
    """Two ends of a connection do not belong together.

    Attributes:
      rank: rank of the other end, -1 when it never said.
      reason: difference, found and expected.
      is_transient: whether dialing again may succeed.
    """

    def __init__(self, rank: int, reason: str, is_transient: bool = False) -> None:
        super().__init__(rank, reason, is_transient)
        self.rank = rank
        self.reason = reason
        self.is_transient = is_transient

    def __str__(self) -> str:
        peer = "an unknown peer" if self.rank < 0 else f"rank {self.rank}"
        return (
            f"Handshake with {peer} refused: {self.reason}. "
            "Start all hosts from one driver generation, with one run id, plan and token."
        )


class PeerLost(MeshError):
    """The connection to a host ended.

    Attributes:
      rank: the host at the other end of the connection that ended.
      reason: how it ended.
      blamed_rank: the host at fault as far as is known: the one that `rank` named when it left because of another, else
        `rank`.
    """

    def __init__(self, rank: int, reason: str, blamed_rank: int | None = None) -> None:
        super().__init__(rank, reason, blamed_rank)
        self.rank = rank
        self.reason = reason
        self.blamed_rank = rank if blamed_rank is None else blamed_rank

    def __str__(self) -> str:
        blamed = "" if self.blamed_rank == self.rank else f", which blames rank {self.blamed_rank}"
        return (
            f"Found the connection to rank {self.rank} ended{blamed}: {self.reason}. Expected it to last for the whole "
            "generation. Replace the lost host and start a new generation from the last commit."
        )


class ExchangeTimeout(MeshError):
    """An exchange did not complete in time.

    Attributes:
      tag, step: which exchange.
      waiting_for: ranks whose frame has not fully arrived.
      unsent: ranks that have not taken our frame.
      timeout_s: how long it was waited.
    """

    def __init__(
        self, tag: int, step: int, waiting_for: Sequence[int], unsent: Sequence[int], timeout_s: float
    ) -> None:
        super().__init__(tag, step, tuple(waiting_for), tuple(unsent), timeout_s)
        self.tag = tag
        self.step = step
        self.waiting_for = tuple(waiting_for)
        self.unsent = tuple(unsent)
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return (
            f"Exchange of tag {self.tag} at step {self.step} is incomplete after {self.timeout_s:.1f} s: found no "
            f"whole frame from ranks {list(self.waiting_for)} and unsent data for ranks {list(self.unsent)}. Expected "
            "both ways to finish. Replace the named hosts, or raise the timeout if they are only slow."
        )


class MeshAborted(MeshError):
    """`abort` was called, by the driver's order or by the host itself.

    Attributes:
      reason: text of the caller of `abort`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"The mesh was aborted: {self.reason}. Form a new mesh with the next generation."


class FrameError(MeshError):
    """A frame is not the one that must come next.

    Attributes:
      rank: the host the frame came from.
      field: the part of the frame that is wrong.
      found, expected: its values, as text.
    """

    def __init__(self, rank: int, field: str, found: str, expected: str) -> None:
        super().__init__(rank, field, found, expected)
        self.rank = rank
        self.field = field
        self.found = found
        self.expected = expected

    def __str__(self) -> str:
        return (
            f"Frame from rank {self.rank} has {self.field} {self.found}. Expected {self.expected}. The connection "
            "carries damaged, repeated or foreign data: start a new generation from the last commit."
        )


class MeshBroken(MeshError):
    """The mesh is used after it ended.

    Attributes:
      reason: cause of its end.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"The mesh has ended and carries nothing more: {self.reason} Form a new mesh with the next generation."
