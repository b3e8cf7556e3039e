"""Events of commits and of the storage under them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from podembed.orchestrator.events.event import Event, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Event):
    """A commit was acknowledged.

    Attributes:
      size_bytes: that it wrote.
      seconds: since the step that it is of.
    """

    kind: ClassVar[str] = "commit"
    name: str
    step: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """A save did not become a commit.

    Attributes:
      reason: a sentence.
      in_a_row: how many have failed since the last commit, with this one.
      is_awaited: training waits until one succeeds.
      head_step: the step to which a fault would lead back now.
      left: why files that it wrote are still there; None if they are gone.
      needs_all: files of earlier commits are lost, so that the next save writes all rows.
      is_full: the storage has no room, which does not pass by itself.
    """

    level: ClassVar[Level] = Level.WARNING
    step: int
    reason: str
    in_a_row: int
    is_awaited: bool
    head_step: int
    left: str | None
    needs_all: bool = False
    is_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDelayed(Event):
    """Training waited to begin a commit, since the one of `before_step` was still being written."""

    level: ClassVar[Level] = Level.WARNING
    step: int
    before_step: int
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitUnsettled(Event):
    """The storage failed while a commit was published, and whether it stands is unknown.

    Attributes:
      timeout_s: for how long it is asked again.
    """

    level: ClassVar[Level] = Level.WARNING
    step: int
    timeout_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCommitTried(Event):
    """The run was asked to end, and the storage fails its last commit, which is tried for `timeout_s`.

    Attributes:
      committed_step: from which a resume would go on.
      reason: a sentence.
    """

    committed_step: int
    timeout_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationAbandoned(Event):
    """The driver left while the storage had not answered for `waited_s`."""

    level: ClassVar[Level] = Level.WARNING
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitVanished(Event):
    """Somebody removed the manifest of a commit.

    Attributes:
      file: its name in the run's folder.
    """

    level: ClassVar[Level] = Level.ERROR
    commit: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesVanished(Event):
    """Files of the newest commit are gone or changed.

    Attributes:
      num_damaged, num_files: of the commit.
      first, found: the first such file, and what is there.
      location: location of the run.
    """

    level: ClassVar[Level] = Level.ERROR
    commit: str
    num_damaged: int
    num_files: int
    first: str
    found: str
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsGivenUp(Event):
    """The run was asked to stop while it recovered from a fault, so nothing is done again now.

    Attributes:
      commit: commit that a resumed run goes on from; None for the first step.
      base_step: base step of that commit.
      reached_step: steps that had been done before the fault.
    """

    level: ClassVar[Level] = Level.WARNING
    commit: str | None
    base_step: int
    reached_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLost(Event):
    """A commit that this driver made or began from is gone, so training goes back.

    Attributes:
      file: its manifest.
      now: the newest commit that there is; None for the first step.
    """

    level: ClassVar[Level] = Level.ERROR
    commit: str
    file: str
    now: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPassedOver(Event):
    """A damaged commit is not used, as the user allows; its steps are done again."""

    level: ClassVar[Level] = Level.WARNING
    commit: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OldCommitsKept(Event):
    """The storage did not delete commits that no policy keeps."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRestored(Event):
    """A record of the run was gone or damaged, and was written again as it was.

    Attributes:
      found: `removed` or `damaged`.
    """

    level: ClassVar[Level] = Level.WARNING
    file: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVanishing(Event):
    """The run's folder, or what the driver wrote in it, is not there now; known at the next commit."""

    level: ClassVar[Level] = Level.ERROR
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatMissed(Event):
    """The heartbeat was not written."""

    level: ClassVar[Level] = Level.WARNING
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageAwaited(Event):
    """The storage is away while nothing can train without it; the driver tries again for up to `timeout_s`."""

    level: ClassVar[Level] = Level.WARNING
    timeout_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageNotAwaited(Event):
    """The storage is away, and the run was asked to end."""

    level: ClassVar[Level] = Level.ERROR
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryUnread(Event):
    """Loss and evaluations of earlier steps could not be read from `history/`."""

    level: ClassVar[Level] = Level.WARNING
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryUnwritten(Event):
    """Loss and evaluations were not written to `history/`."""

    level: ClassVar[Level] = Level.WARNING
    reason: str
