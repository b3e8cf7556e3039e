"""`sentence`: an event in plain English, for people. Sentences are made here alone, of templates where
they only name fields, and no code reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import singledispatch
from typing import Any

from podembed.orchestrator.api.result import Evaluation, MeasuredTable, Recovery
from podembed.orchestrator.api.run_errors import listed
from podembed.orchestrator.api.text import format_bytes, plural
from podembed.orchestrator.events import commits, health, machines, plans, progress, run, tracing
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.templates import TEMPLATES
from podembed.workers.job.ranking import Baseline
from podembed.workers.liveness.worker import Worker

NOTABLE_PART_S = 0.1
# An owner of so many times its even share of a table's buckets is busy because of the placement.
UNEVEN_SHARE = 1.5
MOST_TABLES = 3
"""So many are named in a sentence."""
# Such as a model with a loss of its own, whose samples have one label or none.
NO_FIGURE = "no figure, since the job declares no metrics that these labels allow"


@singledispatch
def sentence(event: Event) -> str:
    """An event in plain English: one line, as a rule."""
    template = TEMPLATES.get(type(event))
    if template is None:
        raise TypeError(
            f"Found no sentence for {type(event).__name__}. Expected one in {__name__}, or a template. Add it there."
        )
    return template.format(**{field.name: getattr(event, field.name) for field in fields(event)})


@sentence.register
def _(event: progress.OwnerBusy) -> str:
    what = (
        f"host {event.host} gets requests for {event.ratio:.1f} times the rows of the mean owner ({event.rows:,} in a "
        f"window, of tables that are cut), most of them of table '{event.table}'."
    )
    # One host cannot have less than a bucket, so a table of few buckets is uneven whatever its ids are.
    if event.held_buckets * event.num_hosts >= UNEVEN_SHARE * event.num_buckets > 0:
        return (
            f"{what} It owns {event.held_buckets} of the table's {plural(event.num_buckets, 'bucket')}, which is why. "
            "Fewer hosts would be busy more evenly"
        )
    return f"{what} Its ids fall on few buckets. Spread them, such as by a hash with a seed, before they are looked up"


@sentence.register
def _(event: progress.IdsAltered) -> str:
    done = {"drop": "dropped", "clip": "clipped", "hash": "hashed"}.get(event.invalid_ids, "altered")
    return (
        f"{event.count:,} ids outside the vocabulary of table '{event.table}' in a window or an evaluation were "
        f"{done}, as its invalid_ids='{event.invalid_ids}' says. Later ones are counted without a notice"
    )


@sentence.register
def _(event: run.RatesWithoutStep) -> str:
    names = ", ".join(event.tables[:MOST_TABLES]) + (", ..." if len(event.tables) > MOST_TABLES else "")
    return (
        f"the learning rate of {plural(len(event.tables), 'table')} ({names}) is a function without the step. Whenever "
        "the run is resumed, or goes on after a fault, it begins anew with all that it counts. Give the function the "
        "step: def rate(step)"
    )


@sentence.register
def _(event: progress.Evaluated) -> str:
    made = event.evaluation
    best = "" if event.best_auc is None else f"  (best reachable {event.best_auc:.4f})"
    losses = "  ".join(f"{name} {value:.4f}" for name, value in made.losses.items())
    shown = "  ".join(filter(None, ["  ".join(figures(made, event.baseline)) + best, losses]))
    return f"step {made.step:>6}  evaluation: {shown or NO_FIGURE}  on {made.num_samples:,} samples{made.reasons}"


def figures(evaluation: Evaluation, baseline: Baseline | None) -> list[str]:
    """AUC, where it has a meaning, and the job's own metrics in words, each with the baseline's behind it where that is
    known.
    """
    known = {} if baseline is None else baseline.figures
    return [
        f"{name} {value:.4f}" + (f" ({baseline.name} {known[name]:.4f})" if baseline and name in known else "")
        for name, value in evaluation.figures.items()
    ]


@sentence.register
def _(event: commits.Committed) -> str:
    return commit_line(event.name, size_bytes=event.size_bytes, seconds=event.seconds)


def commit_line(name: str, *, size_bytes: int, seconds: float) -> str:
    """What is said of a commit."""
    return f"committed {name}  {format_bytes(size_bytes)} in {seconds:.1f} s"


@sentence.register
def _(event: tracing.TraceWritten) -> str:
    clocks = ", ".join(
        f"{one.process} {one.offset_s * 1e3:+.3f} ± {one.uncertainty_s * 1e3:.3f} ms" for one in event.clocks
    )
    dropped = f" {event.num_dropped:,} spans found no room." if event.num_dropped else ""
    fault = f" A fault ended it: {event.fault.rstrip('.')}." if event.fault else ""
    missing = f" Without {', '.join(event.missing)}, which did not answer." if event.missing else ""
    jax = f" JAX's profile is not in it: {'; '.join(event.without_jax)}." if event.without_jax else ""
    return (
        f"traced steps {event.first_step} to {event.last_step - 1}: {event.location} "
        f"({format_bytes(event.size_bytes)}, {event.num_spans:,} spans). Open it at https://ui.perfetto.dev. Clocks "
        f"against the driver's: {clocks or 'of none'}.{fault}{dropped}{missing}{jax}"
    )


@sentence.register
def _(event: commits.SaveFailed) -> str:
    follows = (
        "Training waits and tries again"
        if event.is_awaited
        else "Training goes on, the next save is another try, and a fault would lead back to step "
        + str(event.head_step)
    )
    left = f" Its files are still there and go with a later commit: {event.left}." if event.left else ""
    whole = " The next save writes all rows, since it cannot rely on earlier commits." if event.needs_all else ""
    return (
        f"SAVE FAILED at step {event.step} (number {event.in_a_row} in a row): {event.reason} {follows}.{whole}{left}"
    )


@sentence.register
def _(event: commits.CommitLost) -> str:
    return (
        f"commit {event.commit} has VANISHED since it was made: {event.file} is not there. Training goes back to "
        f"{event.now or 'the first step'}; restore the file from a copy to keep its steps"
    )


@sentence.register
def _(event: commits.StepsGivenUp) -> str:
    return (
        f"stopped in the middle of a recovery: {plural(event.reached_step - event.base_step, 'step')} after step "
        f"{event.base_step} are given up. A resumed run does them again, from {event.commit or 'the first step'}"
    )


@sentence.register
def _(event: run.DriverEnded) -> str:
    return f"the driver ends: {event.error}: {event.message}" if event.error else "the driver ends"


@sentence.register
def _(event: run.FilesInOrder) -> str:
    return event.description


@sentence.register
def _(event: run.GenerationStarted) -> str:
    origin = f"from commit {event.commit}" if event.commit else "from the first step"
    lived = f"; hosts that lived on: {event.survivors}, {_restore(event.restore)}" if event.survivors else ""
    return (
        f"generation {event.generation}: {plural(event.num_hosts, 'host')}, {origin}; started in {event.start_s:.1f} "
        f"s, compiled in {event.compile_s:.1f} s{lived}"
    )


@sentence.register
def _(event: run.Recovered) -> str:
    cost = event.recovery
    return (
        f"recovered in {cost.total_s:.1f} s as generation {cost.generation}: {cost.discarded_steps} steps discarded, "
        f"back at step {cost.base_step}. Noticed within {cost.detect_s:.1f} s, stop {cost.stop_s:.1f} s, start "
        f"{cost.start_s:.1f} s, restore {cost.restore_s:.1f} s, compile {cost.compile_s:.1f} s"
        f"{_parts(cost)}{_kept(cost)}"
    )


def _parts(recovery: Recovery) -> str:
    """What a start consists of, the parts that anybody would notice."""
    long = [f"{name} {seconds:.1f}" for name, seconds in recovery.parts_s.items() if seconds >= NOTABLE_PART_S]
    return f" (of these: {', '.join(long)})" if long else ""


def _kept(recovery: Recovery) -> str:
    """What the hosts that lived on spared."""
    if not recovery.survivors:
        return ""
    return f"; hosts that lived on: {recovery.survivors}, {_restore(asdict(recovery))}"


def _restore(totals: Mapping[str, Any]) -> str:
    """The sources of a generation's rows, with numbers."""
    moved = ""
    if totals["buckets_moved"]:
        size = format_bytes(totals["bytes_moved"])
        moved = f", moved {totals['buckets_moved']} from host to host ({size} in {totals['move_s']:.1f} s)"
    size = format_bytes(totals["bytes_read"])
    return (
        f"buckets kept {totals['buckets_kept']} (undone in {totals['undo_s']:.1f} s){moved}, "
        f"read {totals['buckets_read']} ({size} in {totals['read_s']:.1f} s)"
    )


@sentence.register
def _(event: run.HostsChanged) -> str:
    change = event.change
    if change.before == change.after:
        hosts = plural(change.after, "host")
        return f"{hosts} go on from step {change.step} after {change.seconds:.1f} s: {change.cause}"
    return (
        f"hosts changed from {change.before} to {change.after} at step {change.step} in {change.seconds:.1f} s: "
        f"{change.cause}"
    )


@sentence.register
def _(event: plans.TablesPlanned) -> str:
    named = [
        f"{table.table} on {'the devices' if table.is_on_devices else plural(table.num_hosts, 'host')}: {table.why}"
        for table in event.tables
    ]
    more = f"; and {plural(len(named) - MOST_TABLES, 'more table')}" if len(named) > MOST_TABLES else ""
    return (
        f"plan of the tables from step {event.step} on: {event.why}; the hosts take {1e3 * event.step_s:.2f} ms a step "
        f"as predicted, {1e3 * event.other_s:.2f} without it; {'; '.join(named[:MOST_TABLES])}{more}"
    )


@sentence.register
def _(event: progress.TablesMeasured) -> str:
    slowest = sorted(event.tables, key=lambda table: -table.step_s)[:MOST_TABLES]
    each = "; ".join(
        f"{table.name} {_took(table)} ({table.ids_per_sample:.3g} ids a sample, {table.distinct_share:.0%} distinct, "
        f"{table.hot_share:.0%} of 256 rows{_sent(table)})"
        for table in slowest
    )
    return f"step {event.step}: ms a step of a host for each of {plural(len(event.tables), 'table')}: {each}"


def _took(table: MeasuredTable) -> str:
    return "on the devices" if table.is_on_devices else f"{1e3 * table.step_s:.2f}"


def _sent(table: MeasuredTable) -> str:
    return "" if table.is_on_devices else f", sends {format_bytes(table.sent_bytes)}"


@sentence.register
def _(event: progress.ExchangesChosen) -> str:
    kinds = ", ".join(event.relayed)
    way = f"{kinds} go by way of relays" if kinds else "all frames go directly to their hosts"
    return f"step {event.step}: between {plural(event.num_hosts, 'host')} {way} from here on"


@sentence.register
def _(event: progress.ProgramsCompiled) -> str:
    programs = plural(event.num_programs, "program")
    return (
        f"step {event.step}: compiled {programs} for bags or sequences of other lengths in {event.seconds:.1f} s, "
        f"{event.total} so far"
    )


@sentence.register
def _(event: run.WarmStarted) -> str:
    return event.description


@sentence.register
def _(event: run.VersionsDiffer) -> str:
    told = ", ".join(f"{name} {was} (now {now})" for name, (was, now) in event.versions.items())
    return f"commit {event.commit} was written with {told}; the run may not repeat bit by bit from here"


@sentence.register
def _(event: machines.HostsChosen) -> str:
    asked = plural(event.most, "host")
    wanted = asked if event.least == event.most else f"{event.least} to {asked}"
    return f"{plural(event.num_hosts, 'host')} of {wanted}: {event.reason}"


@sentence.register
def _(event: machines.HostsWillChange) -> str:
    when = "at the next commit" if event.is_at_commit else "after this window, which is committed"
    return f"hosts change {when}: {event.reason}"


@sentence.register
def _(event: machines.HostsShareMachines) -> str:
    return f"{event.num_hosts} hosts share {plural(event.machines, 'machine')}"


@sentence.register
def _(event: machines.DevicesFound) -> str:
    return "devices: " + "; ".join(f"{kind} for {_hosts(hosts)}" for kind, hosts in event.hosts.items())


@sentence.register
def _(event: machines.AcceleratorsMissing) -> str:
    return (
        f"{_hosts(event.hosts)}: found processors only, with {' and '.join(event.reserved)} reserved for each host. "
        "Training goes on there. Install JAX's plugin for the accelerator on every machine (jax[cuda13], jax[tpu]), "
        "and see what JAX_PLATFORMS is set to."
    )


@sentence.register
def _(event: machines.AcceleratorsIdle) -> str:
    return (
        f"the cluster has {' and '.join(event.idle)}, and hosts reserve none: models run on CPUs. Reserve whole ones "
        "for each host with --resources, or resources_per_host, such as --resources CPU=8 GPU=1"
    )


@sentence.register
def _(event: machines.ConnectionRefused) -> str:
    return event.description


@sentence.register
def _(event: machines.BucketsRefused) -> str:
    return (
        f"{event.buckets} buckets that hosts sent to host {', '.join(map(str, event.hosts))} did not come or did not "
        "have the digests of the commit. They were read from its files. Expected none. Look for a host with faulty "
        "memory or a faulty network, and report it if it comes again"
    )


@sentence.register
def _(event: health.AlarmBegan) -> str:
    return f"{'NOTE' if event.is_note else 'ALARM'} {event.alarm} at step {event.step}: {event.finding}. {event.remedy}"


@sentence.register
def _(event: health.AlarmEnded) -> str:
    subject = f" of {event.subject}" if event.subject else ""
    return f"alarm {event.alarm}{subject} is over at step {event.step}"


def _hosts(numbers: tuple[int, ...]) -> str:
    return listed([Worker("host", number) for number in numbers])
