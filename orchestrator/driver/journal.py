"""`Journal`: what a driver writes down of its run beside the commits: history, malformed rows, what became of files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.driver.upkeep import Upkeep
from podembed.orchestrator.run.dead_letters import DeadLetters
from podembed.orchestrator.run.history import History
from podembed.orchestrator.run.history_record import HistoryKeeper
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.data.bad_rows import BadRow


class Journal:
    """See the module. Mutated: all of its parts, as the run goes on.

    Args:
      notice: told sentences for the user.
      unix_s: wall clock.

    Attributes:
      history: what this driver saw; without what was done after the commit that a generation starts from.
      keeper, upkeep: used by the publishing thread, too; what they have to say is said by `tell`.
    """

    def __init__(
        self,
        run: OpenRun,
        config: CheckpointConfig,
        *,
        notice: Callable[[str], None],
        unix_s: Callable[[], float],
    ) -> None:
        self.history = History()
        self.keeper = HistoryKeeper(run.store, notice=notice)
        self.upkeep = Upkeep(run.store, run.record, config, unix_s=unix_s)
        self._run = run
        self._notice = notice
        # Read when the first malformed row comes: most runs have none.
        self._letters: DeadLetters | None = None

    def begin(self, step: int) -> None:
        """A generation starts from `step`."""
        self.history.cut(step)
        self.keeper.begin(step)

    def metrics_at(self, step: int) -> dict[str, float]:
        """What an evaluation of exactly this state found; empty without one."""
        last = self.history.evaluations[-1:]
        return last[0].comparable if last and last[0].step == step else {}

    def tell(self) -> None:
        """Says what the publishing thread had to say."""
        self.keeper.tell()
        for sentence in self.upkeep.take():
            self._notice(sentence)

    def put_aside(self, rows: Sequence[BadRow]) -> None:
        """Writes malformed rows that hosts left out to the run's folder.

        Raises:
          JobFailed: there are more than the job tolerates.
        """
        if not rows:
            return
        if self._letters is None:
            self._letters = DeadLetters(self._run.store, max_bad_rows=self._run.job.data.max_bad_rows)
        letters = self._letters
        if letters.add(rows, generation=self._run.generation):
            self._notice(f"{letters.num_rows} malformed rows left out so far, listed in {letters.location}")
        letters.require_good_rows(self._run.train_index)
