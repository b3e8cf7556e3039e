"""What to do about a damage that `fsck` found: what of the run depends on the file, and the command that goes on.
Decided from names alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from podembed.orchestrator.commit.deletions import FOLDER as DELETING
from podembed.orchestrator.commit.run_record import RUN_FILE
from podembed.orchestrator.run.history_record import FOLDER as HISTORY
from podembed.orchestrator.run.input_record import CHANGES_FOLDER, INPUT_FILE
from podembed.orchestrator.run.job_settings import FOLDER as SETTINGS
from podembed.orchestrator.run.policy_record import FOLDER as POLICIES

PUBLISHED = "publish"
SHORTER_CHAIN = (
    "a run goes on without the commit that is missing. To be able to go back to it, restore its manifest and files "
    "from a copy"
)


def remedy_of(
    file: str,
    *,
    location: str,
    newest_base: str | None,
    needed_base: str | None,
    newest_change: str | None,
    newest_commit: str | None,
) -> str:
    """What to do about a file of the run as a whole.

    Args:
      newest_base, newest_change: the files whose content a start depends on.
      needed_base: an older base that no commit tells.
      newest_commit: the newest that is whole.
    """
    run, resume = shlex.quote(location), f"podembed resume {shlex.quote(location)}"
    kind = file.split("/", 1)[0]
    if kind == PUBLISHED:
        return f"servers go on with the version that they have; podembed publish {run} offers another one"
    if file == RUN_FILE:
        begun = f", and a new run can begin from commit {newest_commit}: --warm-start {run}@{newest_commit}"
        return (
            "restore it from a copy; a driver that still trains here writes it again at its next commit. Without "
            f"either tables can be read (podembed export){begun if newest_commit else ''}"
        )
    if file == INPUT_FILE:
        return (
            f"it is advice: {resume} goes on without it, and writes it again where the data files are those that the "
            "run began with"
        )
    if kind == CHANGES_FOLDER and file == newest_change:
        return f"if the data files hold the rows that the run was trained on: {resume} --accept-input-change"
    if kind == CHANGES_FOLDER:
        return "it is advice: nothing depends on it"
    if file == f"{POLICIES}/":
        return f"it is advice: {resume} keeps the newest 3, unless --keep, --keep-every and --keep-best say which"
    if file == f"{HISTORY}/":
        return "training needs none of it, people read it: the next commit writes another, of the steps from there on"
    if kind == POLICIES:
        return f"it is advice: {resume} keeps all commits, unless --keep, --keep-every and --keep-best say which"
    if kind == HISTORY:
        return "training needs none of it, people read it: delete the file, and the next commit writes another"
    if kind == SETTINGS:
        return f"delete the file: the arguments before it count then; {resume} --set changes them again"
    if kind == DELETING:
        return "it is advice: delete the file; `podembed prune` ends what it tells of"
    if kind == "lease" and file.endswith(".claim"):
        return "nothing reads what it says: a run goes on without it"
    if file == newest_base:
        return f"{resume} --allow-ancestor finds the newest commit without it"
    if file == needed_base:
        return (
            "restore it from a copy: commits of older generations do not count without it. A run goes on from the "
            "newest commit, and nothing old is deleted"
        )
    if kind == "lease":
        return "a run goes on without it: the first commit of its generation tells the same, if it made one"
    return ""


def remedy_of_index(*, location: str, is_head: bool) -> str:
    """What to do about a file whose rows are good and whose index misleads other readers."""
    later = f". The next full commit of podembed resume {shlex.quote(location)} writes new files" if is_head else ""
    return (
        "nothing for training: a run goes on without the index, and podembed export reads the rows. For other readers, "
        f"such as zarr, restore the file from a copy{later}"
    )


def remedy_of_commit(*, location: str, is_head: bool, counts: bool, whole: Sequence[str]) -> str:
    """What to do about a damage in the files of a commit.

    Args:
      whole: the commits that count and can be restored, newest first.
    """
    if not counts:
        return "the commit does not count: nothing depends on it"
    if not is_head:
        return (
            "restore it from a copy to be able to go back to this commit. Newer commits do not need it, and a run goes "
            "on without it"
        )
    if whole:
        return (
            f"restore it from a copy, or go back to {whole[0]}: podembed resume {shlex.quote(location)} "
            "--allow-ancestor does the steps since again"
        )
    return "restore it from a copy: no older commit is whole. What other tables hold can be read (podembed export)"
