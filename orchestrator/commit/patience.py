"""What a run bears of its storage: how many saves may fail, how long one is tried again, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass

from podembed.orchestrator.events.commits import SaveFailed
from podembed.workers.storage.storage_errors import StorageError

# A disk that is full does not become empty by itself, and somebody waits for the end of the run.
FULL_AT_STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How many storage failures a run tolerates, and how long.

    Attributes:
      max_failed_saves: after so many failures in a row training waits for the next save; 0 ends the run with the first.
      timeout_s: how long training then tries again, and how long the commit of the last step is tried. 0 ends the run
        where it would have to wait.
    """

    max_failed_saves: int = 3
    timeout_s: float = 1800.0

    def until_s(self, started_s: float, stop_s: float | None, last: SaveFailed | None) -> float:
        """Until when a save that training waits for is tried again.

        Args:
          started_s: since when it is tried.
          stop_s: since when the run is to end, if it is.
          last: how it failed last.
        """
        until_s = started_s + self.timeout_s
        is_full = last is not None and last.is_full
        return until_s if stop_s is None or not is_full else min(until_s, stop_s + FULL_AT_STOP_S)


class SavesFailed(StorageError):
    """No save succeeded for longer than the run bears.

    Args:
      found: the end of the sentence that begins with the number of failures.
      last: the last failure, if there was one.
      head_step: step of the commit that stands, None before the first.
    """

    def __init__(self, found: str, *, in_a_row: int, last: SaveFailed | None, head_step: int | None) -> None:
        reason = last.reason if last else "none was begun."
        follows = (
            "Expected a first commit. Mend the storage, then resume."
            if head_step is None
            else "Expected a commit before training goes on or ends. Mend the storage, then resume; the commit of step "
            f"{head_step} stands."
        )
        super().__init__(f"Found {in_a_row} saves failed in a row, {found}: {reason} {follows}")
