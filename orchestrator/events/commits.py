"""Events of commits and of the storage under them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from podembed.orchestrator.api.text import format_bytes, plural
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

    def sentence(self) -> str:
        return commit_line(self.name, size_bytes=self.size_bytes, seconds=self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event, level=Level.WARNING):
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

    step: int
    reason: str
    in_a_row: int
    is_awaited: bool
    head_step: int
    left: str | None
    needs_all: bool = False
    is_full: bool = False

    def sentence(self) -> str:
        follows = (
            "Training waits and tries again"
            if self.is_awaited
            else "Training goes on, the next save is another try, and a fault would lead back to step "
            + str(self.head_step)
        )
        left = f" Its files are still there and go with a later commit: {self.left}." if self.left else ""
        whole = " The next save writes all rows, since it cannot rely on earlier commits." if self.needs_all else ""
        return (
            f"SAVE FAILED at step {self.step} (number {self.in_a_row} in a row): {self.reason} {follows}.{whole}{left}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDelayed(Event, level=Level.WARNING):
    """Training waited to begin a commit, since the one of `before_step` was still being written."""

    template = (
        "step {step}: training waited {waited_s:.1f} s to begin a commit; the one of step {before_step} was still "
        "being written. Commit less often, or give the run a faster storage"
    )
    step: int
    before_step: int
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitUnsettled(Event, level=Level.WARNING):
    """The storage failed while a commit was published, and whether it stands is unknown.

    Attributes:
      timeout_s: for how long it is asked again.
    """

    template = (
        "step {step}: the storage failed while the commit was published, and nobody knows whether it stands; it is "
        "asked again for up to {timeout_s:.0f} s. {reason}"
    )
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

    template = (
        "the run is to end, but the storage fails its last commit: {reason} It is tried again for up to "
        "{timeout_s:.0f} s. Ctrl-C once more leaves at once; a resume then goes on from step {committed_step}"
    )
    committed_step: int
    timeout_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationAbandoned(Event, level=Level.WARNING):
    """The driver left while the storage had not answered for `waited_s`."""

    template = (
        "left while the storage had not answered for {waited_s:.0f} s. What was committed stands; whether the commit "
        "that was being published does, the next driver finds out"
    )
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitVanished(Event, level=Level.ERROR):
    """Somebody removed the manifest of a commit.

    Attributes:
      file: its name in the run's folder.
    """

    template = (
        "commit {commit} has VANISHED: somebody removed {file}. The next commit is whole without it; restore the "
        "file from a copy to be able to go back to it"
    )
    commit: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesVanished(Event, level=Level.ERROR):
    """Files of the newest commit are gone or changed.

    Attributes:
      num_damaged, num_files: of the commit.
      first, found: the first such file, and what is there.
      location: location of the run.
    """

    template = (
        "{num_damaged} of the {num_files} files of commit {commit} have VANISHED or changed, first {first} "
        "({found}). A fault before the next commit would end the run; `podembed fsck {location}` names all"
    )
    commit: str
    num_damaged: int
    num_files: int
    first: str
    found: str
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsGivenUp(Event, level=Level.WARNING):
    """The run was asked to stop while it recovered from a fault, so nothing is done again now.

    Attributes:
      commit: commit that a resumed run goes on from; None for the first step.
      base_step: base step of that commit.
      reached_step: steps that had been done before the fault.
    """

    commit: str | None
    base_step: int
    reached_step: int

    def sentence(self) -> str:
        return (
            f"stopped in the middle of a recovery: {plural(self.reached_step - self.base_step, 'step')} after step "
            f"{self.base_step} are given up. A resumed run does them again, from {self.commit or 'the first step'}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLost(Event, level=Level.ERROR):
    """A commit that this driver made or began from is gone, so training goes back.

    Attributes:
      file: its manifest.
      now: the newest commit that there is; None for the first step.
    """

    commit: str
    file: str
    now: str | None

    def sentence(self) -> str:
        return (
            f"commit {self.commit} has VANISHED since it was made: {self.file} is not there. Training goes back to "
            f"{self.now or 'the first step'}; restore the file from a copy to keep its steps"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPassedOver(Event, level=Level.WARNING):
    """A damaged commit is not used, as the user allows; its steps are done again."""

    template = "commit {commit} is damaged and passed over, its steps are done again: {reason}"
    commit: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OldCommitsKept(Event):
    """The storage did not delete commits that no policy keeps."""

    template = "old commits were not deleted: {reason}"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRestored(Event, level=Level.WARNING):
    """A record of the run was gone or damaged, and was written again as it was.

    Attributes:
      found: `removed` or `damaged`.
    """

    template = "{file} had been {found}; it was written again, as it was"
    file: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVanishing(Event, level=Level.ERROR):
    """The run's folder, or what the driver wrote in it, is not there now; known at the next commit."""

    template = "THE RUN HAS VANISHED; it ends at the next commit unless its files are back. {reason}"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatMissed(Event, level=Level.WARNING):
    """The heartbeat was not written."""

    template = "the heartbeat was not written, so another driver may take this one for gone: {reason}"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageAwaited(Event, level=Level.WARNING):
    """The storage is away while nothing can train without it; the driver tries again for up to `timeout_s`."""

    template = (
        "the storage is away, and the run cannot go on without it; it is asked again for up to {timeout_s:.0f} s. "
        "{reason}"
    )
    timeout_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageNotAwaited(Event, level=Level.ERROR):
    """The storage is away, and the run was asked to end."""

    template = "the run ends without waiting for the storage. {reason}"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryUnread(Event, level=Level.WARNING):
    """Loss and evaluations of earlier steps could not be read from `history/`."""

    template = "loss and evaluations of earlier steps are lost to history/, training is not touched: {reason}"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryUnwritten(Event, level=Level.WARNING):
    """Loss and evaluations were not written to `history/`."""

    template = "loss and evaluations were not written to history/, training is not touched: {reason}"
    reason: str


def commit_line(name: str, *, size_bytes: int, seconds: float) -> str:
    """What is said of a commit."""
    return f"committed {name}  {format_bytes(size_bytes)} in {seconds:.1f} s"
