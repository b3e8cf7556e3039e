"""Sentences that only name fields of an event."""

from __future__ import annotations

from podembed.orchestrator.events import commits, machines, plans, progress, run, tracing
from podembed.orchestrator.events.event import Event

TEMPLATES: dict[type[Event], str] = {
    progress.WindowTrained: "trained up to step {report.step} of {report.total_steps}: loss {report.loss:.4f}",
    progress.EvaluationCut: (
        "{reason}: the evaluation after step {step} is cut after {seconds:.0f} s and gives no figures; "
        "`podembed resume` makes it first"
    ),
    progress.StoppedEarly: "stopped early at step {step} of {total_steps}: {reason}",
    progress.HostSlow: (
        "host {host} is slow: {ratio:.1f} times the work time of the others, most of it in {phase} ({phase_s:.2f} s "
        "a window, the others {others_phase_s:.2f} s)"
    ),
    progress.HostKeepsUp: "host {host} keeps up with the others again",
    progress.OwnersEven: "rows are asked of all owners evenly again",
    progress.ColumnUnknown: "{found}",
    progress.RowsPutAside: "{num_rows} malformed rows left out so far, listed in {location}",
    commits.CommitDelayed: (
        "step {step}: training waited {waited_s:.1f} s to begin a commit; the one of step {before_step} was still "
        "being written. Commit less often, or give the run a faster storage"
    ),
    commits.CommitUnsettled: (
        "step {step}: the storage failed while the commit was published, and nobody knows whether it stands; it is "
        "asked again for up to {timeout_s:.0f} s. {reason}"
    ),
    commits.LastCommitTried: (
        "the run is to end, but the storage fails its last commit: {reason} It is tried again for up to "
        "{timeout_s:.0f} s. Ctrl-C once more leaves at once; a resume then goes on from step {committed_step}"
    ),
    commits.PublicationAbandoned: (
        "left while the storage had not answered for {waited_s:.0f} s. What was committed stands; whether the commit "
        "that was being published does, the next driver finds out"
    ),
    commits.CommitVanished: (
        "commit {commit} has VANISHED: somebody removed {file}. The next commit is whole without it; restore the "
        "file from a copy to be able to go back to it"
    ),
    commits.FilesVanished: (
        "{num_damaged} of the {num_files} files of commit {commit} have VANISHED or changed, first {first} "
        "({found}). A fault before the next commit would end the run; `podembed fsck {location}` names all"
    ),
    commits.CommitPassedOver: "commit {commit} is damaged and passed over, its steps are done again: {reason}",
    commits.OldCommitsKept: "old commits were not deleted: {reason}",
    commits.RecordRestored: "{file} had been {found}; it was written again, as it was",
    commits.RunVanishing: "THE RUN HAS VANISHED; it ends at the next commit unless its files are back. {reason}",
    commits.HeartbeatMissed: "the heartbeat was not written, so another driver may take this one for gone: {reason}",
    commits.StorageAwaited: (
        "the storage is away, and the run cannot go on without it; it is asked again for up to {timeout_s:.0f} s. "
        "{reason}"
    ),
    commits.StorageNotAwaited: "the run ends without waiting for the storage. {reason}",
    commits.HistoryUnread: (
        "loss and evaluations of earlier steps are lost to history/, training is not touched: {reason}"
    ),
    commits.HistoryUnwritten: "loss and evaluations were not written to history/, training is not touched: {reason}",
    plans.NotPlanned: "tables lie by size and features: {reason}",
    run.DriverBegan: "a driver begins",
    run.RunOpened: "run folder {url}",
    run.BatchNotFilled: (
        "batch_size is {batch_size:,} and the data has {num_samples:,} samples, so an epoch is one step, filled up "
        "with padding. Lower batch_size, or see whether all of the data is there"
    ),
    run.RowGroupsShared: (
        "{num_rows:,} rows of {num_columns:,} columns lie in {num_row_groups} row groups or blocks, and each of "
        "{num_lanes} lanes decodes a whole one for its part of it, which takes time. Write the data with row "
        "groups of some ten thousand rows, many more than lanes, or lower num_lanes"
    ),
    run.CallbackFailed: (
        "callback {callback} failed in {method}: {error}. The run goes on without what it did there.\n{trace}"
    ),
    run.CallbacksLeft: (
        "a callback has not come back within {waited_s:.0f} s of the end, and is left behind; {untold} calls were "
        "not made"
    ),
    run.SinkFailed: "measurements do not reach {sink}: {error}. The run goes on without; {dropped} lines were dropped",
    tracing.TraceCut: (
        "the trace of steps {asked} begins at step {first_step} and ends before step {last_step}: {reason}"
    ),
    tracing.TraceLost: "NO TRACE of steps {asked}: {reason}. Training is as without it",
    run.MetricsServed: "measurements for Prometheus: http://localhost:{port}/metrics",
    run.NothingLeft: "nothing is left to do in {url}: step {step} is committed as {commit}",
    run.GenerationLost: "fault: {cause}",
    run.GenerationEnded: "generation {generation} ends in order: {reason}",
    run.SurvivorsDropped: "the hosts that lived on are ended and all processes are started anew: {reason}",
    run.WorkersKilled: "workers were ended without leaving in order: {reason}",
    run.SettingsChanged: "settings changed from step {step} on: {changes}",
    run.DataFilesChanged: "the input changed, accepted from step {step} on: {shown}",
    run.InputRecordDamaged: "a record of the run's data files is damaged and ignored: {file} ({found})",
    run.InputRecordRewritten: (
        "{file} was damaged or gone; it was written again from the data files, which are those that the run began with"
    ),
    run.MeaningRecorded: (
        "an older version began this run and did not record how values become rows. {file} has it from now on, as the "
        "job says it today: whether that was changed before is not known"
    ),
    run.MeaningUnknown: (
        "the run in {location} has no record of how values become rows, so it is not compared with the job. Tables "
        "without names are matched by their position: see to it that columns, vocabularies and salts are the same"
    ),
    run.AccumulatorKept: (
        "the job has initial_accumulator_value={found:g}, which changes nothing: the run keeps the {kept:g} that it "
        "began with"
    ),
    run.PoliciesIgnored: (
        "the record of which commits stay is damaged and ignored: {file} ({found}). All commits stay, unless flags "
        "say otherwise (--keep, --keep-every, --keep-best)"
    ),
    machines.HostsAwaited: (
        "waiting for hosts: {needed} needed, found {found}. Everything up to step {step} is committed. The run goes "
        "on as soon as there are enough, and ends in {left_s:.0f} s if there are not"
    ),
    machines.MachineRests: "{machine} is not used for {seconds:.0f} s: {reason}",
    machines.NicenessFound: (
        "Ray runs the hosts with a niceness of {niceness}: beside other busy programs they starve. For the usual "
        "priority put RAY_worker_niceness=0 into the environment of `ray start` on every machine"
    ),
    machines.ClusterAwaited: (
        "waiting for the Ray cluster at {address}, where no process listens. The run goes on as soon as it is back, "
        "and ends in {timeout_s:.0f} s if it is not"
    ),
    machines.ClusterRestarted: "{reason}: the program starts its cluster again",
    machines.HeadSilent: (
        "Ray's head at {address} takes no connection. Until it does, the program sends it no request. The run ends "
        "if it does not within {timeout_s:.0f} s, or {idle_timeout_s:.0f} s where hosts are lost with it"
    ),
    machines.HeadBack: "Ray's head at {address} takes connections again",
    machines.RayLeftBehind: (
        "leaving Ray without its head: for {timeout_s:.0f} s, then the rest is left to Ray's other processes"
    ),
    machines.MemoryWrong: (
        "{buckets} buckets of hosts that lived on did not have the digests of the commit after going back to it in "
        "memory. They were read from its files. Expected none. Look for a host with faulty memory, and report it if "
        "it comes again"
    ),
}
"""By type of event; names in braces are fields."""
