"""`Callback`: a user's own code that hears how a run goes, such as a tracker of experiments."""

from __future__ import annotations

from typing import Any


class Callback:
    """Hears how a run goes. A subclass has those of the methods that it needs. Hosts make the job too, but call no
    callback; so open files and connections in `on_begin`, and not when it is made.

    All of them are called by the driver's program, in one thread that does nothing else, in the order in which things
    happen. They get frozen values, so they change no number. A method may return a text: then the run commits and
    leaves, as after Ctrl-C, and the text is the reason. A later `resume` goes on.

    After a fault the steps since the last commit are trained again, and are reported again, with a higher
    `report.generation`.

    What a callback raises is reported with the callback's name and does not end the run, `SystemExit` and
    `KeyboardInterrupt` neither. A slow one delays the run by 5 s at most each time, which is said once; what it has not
    heard by then waits for it.
    """

    def on_begin(self, path: str, arguments: dict[str, Any]) -> str | None:
        """A driver begins, or goes on with, the run at `path`, a folder or URL. `arguments` are those of the job's
        function; empty for a job without a name.
        """

    def on_window(self, report: Any) -> str | None:
        """A window of steps is done. `report` is a `podembed.WindowReport`: step, loss, samples a second ..."""

    def on_evaluation(self, evaluation: Any) -> str | None:
        """The evaluation samples were scored. `evaluation` is a `podembed.Evaluation`; its `values` are all figures by
        name.
        """

    def on_commit(self, name: str, step: int) -> str | None:
        """The commit of that name, of the state after `step` steps, stands."""

    def on_end(self, result: Any) -> None:
        """The call ended. `result` is its `podembed.Result`, or None where an error ended it or nothing was trained."""
