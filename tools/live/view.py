"""How a snapshot looks: some lines that fit a terminal, and one line for a pipe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from podembed.orchestrator.api.text import format_bytes, format_duration, format_rate, plural, printable
from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.live.snapshot import HostView, LiveSnapshot
from podembed.tools.metrics.point import Point, StreamLine

_BARS = "▁▂▃▄▅▆▇█"
_SOURCES = ("input", "device", "hosts", "storage")
_BAR_WIDTH = 30
_FIGURES = {"auc": "AUC", "log_loss": "log loss"}
# Learning curves of windows, where the run has them, and how they are called here.
_WINDOW_FIGURES = {
    "window_auc": "AUC of windows",
    "window_normalized_entropy": "NE",
    "window_calibration": "calibration",
}
_FIXED_LINES = 13
"""Lines of a view, beside those of hosts and faults."""


def screen(seen: LiveSnapshot, *, width: int, height: int, is_unicode: bool, ended: str = "") -> RenderableType:
    """The whole view.

    Args:
      width, height: width and height of the terminal.
      is_unicode: whether it shows small bars.
      ended: why it is the last one; empty while the run goes on.
    """
    lines = [
        _headline(seen, ended),
        _progress(seen, is_unicode=is_unicode),
        _learning(seen, is_unicode=is_unicode),
        _speed(seen, is_unicode=is_unicode),
        _goodput(seen),
        _commit(seen),
        _alarms(seen),
        *_tables(seen),
    ]
    room = max(2, height - _FIXED_LINES)
    num_faults = min(max(1, len(seen.faults)), max(1, room // 2))
    hosts = _busiest(seen.hosts, max(1, room - num_faults))
    parts: list[RenderableType] = [_cut(line, width, is_unicode=is_unicode) for line in lines]
    parts += [Text(), _hosts_table(hosts, len(seen.hosts), width, is_unicode=is_unicode), Text()]
    parts += [_cut(line, width, is_unicode=is_unicode) for line in _faults(seen, num_faults)]
    return Group(*parts)


def one_line(seen: LiveSnapshot, window: Point | None) -> str:
    """A window, for a pipe."""
    if window is None:
        return f"{seen.name}  no window yet"
    parts = [
        f"step {window.step}" + (f"/{seen.total}" if seen.total else ""),
        _figure("loss", window.value("loss"), ".4f"),
        f"{format_rate(window.value('samples_per_second') or 0.0)} samples/s",
        _share("goodput", window.value("goodput_ratio")),
        f"hosts {window.value('hosts') or 0:.0f}",
        f"generation {window.generation}",
        f"committed step {committed:.0f}" if (committed := seen.last("committed_step")) else "no commit yet",
    ]
    auc = seen.newest_of("evaluation", "metric").get("auc")
    parts += [_figure("AUC", auc, ".4f")] if auc is not None else []
    return printable("  ".join(part for part in parts if part))


def fault_line(line: StreamLine) -> str:
    """A fault with its local time."""
    return printable(f"{_clock(line.unix_s)}  {line.text}").replace("\n", " ")


def alarm_line(finding: StandingAlarm, began: int, *, is_over: bool = False) -> str:
    """An alarm that began or ended, for a pipe."""
    what = f"{'note' if finding.kind.is_note else 'alarm'}: {' '.join(finding.key).strip()} since step {began:,}"
    return printable(f"{what}, over now" if is_over else f"{what}: {finding.text}").replace("\n", " ")


def _headline(seen: LiveSnapshot, ended: str) -> Text:
    if ended:
        state, style = ended, "bold"
    elif seen.silent_s is None:
        state, style = "no driver", "yellow"
    elif not seen.is_driven:
        state, style = f"driver silent for {format_duration(seen.silent_s)}", "bold red"
    elif seen.window is None:
        state, style = "starts: no window yet", "yellow"
    else:
        state, style = f"last window {format_duration(seen.now_unix_s - seen.window.unix_s)} ago", "green"
    window = seen.window
    where = f"generation {window.generation}, {plural(int(window.value('hosts') or 0), 'host')}" if window else ""
    return Text.assemble((printable(seen.name), "bold"), "  ", where, "  " if where else "", (state, style))


def _progress(seen: LiveSnapshot, *, is_unicode: bool) -> Text:
    step = seen.window.step if seen.window else 0
    if not seen.total:
        return Text(f"step     {step:,}")
    share = min(1.0, step / seen.total)
    done = round(share * _BAR_WIDTH)
    full, empty = ("█", "░") if is_unicode else ("#", "-")
    left = seen.left_s if seen.is_driven else None
    tail = f"  {format_duration(left)} left" if left else ""
    return Text.assemble(
        f"step     {step:,} of {seen.total:,}  ",
        (full * done, "cyan"),
        (empty * (_BAR_WIDTH - done), "dim"),
        f"  {share:.1%}{tail}",
    )


def _learning(seen: LiveSnapshot, *, is_unicode: bool) -> Text:
    parts = [f"loss     {seen.last('loss') or math.nan:.4f}", _spark(seen.values("loss"), is_unicode=is_unicode)]
    parts += [
        f"{_FIGURES.get(name, printable(name))} {value:.4f}"
        for name, value in seen.newest_of("evaluation", "metric").items()
        if name != "loss"
    ]
    for name, words in _WINDOW_FIGURES.items():
        # Those of several tasks would not fit.
        of_tasks = [*seen.newest_of(name, "task").values()]
        parts += [_figure(words, of_tasks[0], ".4f")] if len(of_tasks) == 1 else []
    return Text("  ".join(part for part in parts if part))


def _speed(seen: LiveSnapshot, *, is_unicode: bool) -> Text:
    rate, step_s = seen.last("samples_per_second"), seen.last("step_seconds")
    per_cpu = seen.last("samples_per_cpu_second")
    median = seen.stream.median_samples_per_s
    parts = [
        f"speed    {format_rate(rate) if rate is not None else '-'} samples/s",
        _spark(seen.values("samples_per_second"), is_unicode=is_unicode),
        f"median {format_rate(median)}" if median is not None else "",
        f"{step_s * 1e3:.4g} ms a step" if step_s is not None else "",
        f"{format_rate(per_cpu)} a CPU second" if per_cpu is not None else "",
    ]
    return Text("  ".join(part for part in parts if part))


def _goodput(seen: LiveSnapshot) -> Text:
    goodput = seen.last("goodput_ratio")
    lost = sum(int(line.values.get("discarded_steps") or 0) for line in seen.stream.events if line.kind == "recovery")
    num = sum(line.kind == "recovery" for line in seen.stream.events)
    told = f"{num} {'recovery' if num == 1 else 'recoveries'}, {plural(lost, 'step')} lost"
    words = f"goodput  {'-' if goodput is None else f'{goodput:.1%}'} of the driver's time"
    return Text.assemble(words, "  ", (told, "yellow" if num else "dim"))


def _commit(seen: LiveSnapshot) -> Text:
    made = seen.event("commit")
    if made is None:
        return Text("commit   none yet")
    size, took = made.values.get("size_bytes"), made.values.get("seconds")
    words = [f"commit   {made.values.get('name')}"]
    words += [f"{format_bytes(size)} in {took:.1f} s"] if size is not None and took is not None else []
    words.append(f"{format_duration(seen.now_unix_s - made.unix_s)} ago")
    return Text(printable("  ".join(words)))


def _alarms(seen: LiveSnapshot) -> Text:
    if not seen.alarms:
        return Text("alarms   none", style="dim")
    alarms = sorted(seen.alarms, key=lambda one: one[0].kind.is_note)
    told = [
        f"{'note ' if one.kind.is_note else ''}{' '.join(filter(None, (one.alarm, one.subject)))} since {began:,}"
        for one, began in alarms
    ]
    return Text(printable(f"alarms   {'; '.join(told)}"), style="" if alarms[0][0].kind.is_note else "bold red")


def _tables(seen: LiveSnapshot) -> list[Text]:
    """The table that is worst in each respect, where hosts have looked at their rows."""
    trained = seen.newest_of("table_trained_ratio", "table")
    growth = seen.newest_of("table_row_growth", "table", quantile="0.9")
    parts = []
    if growth:
        table = max(growth, key=lambda name: growth[name])
        parts.append(f"rows grown to {growth[table]:.2g} times ({printable(table)})")
    if trained:
        table = min(trained, key=lambda name: trained[name])
        parts.append(f"trained from {trained[table]:.0%} ({printable(table)})")
    return [Text("tables   " + "  ".join(parts))] if parts else []


def _busiest(hosts: Sequence[HostView], room: int) -> list[HostView]:
    """The slowest by their own work, in the order of their numbers, if not all fit."""
    if len(hosts) <= room:
        return [*hosts]
    slow = sorted(hosts, key=lambda host: sum(host.waited.get(source, 0.0) for source in _SOURCES))[:room]
    return [host for host in hosts if host in slow]


def _hosts_table(hosts: Sequence[HostView], num: int, width: int, *, is_unicode: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", width=width, pad_edge=False)
    title = "host" if len(hosts) == num else f"{len(hosts)} of {num}"
    table.add_column(title, justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    for source in _SOURCES:
        table.add_column(source, justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("longest phases, ms a step", no_wrap=True, ratio=1)
    for column in table.columns:
        column.overflow = "ellipsis" if is_unicode else "crop"
    for host in hosts:
        shares = [f"{host.waited[source]:.0%}" if source in host.waited else "-" for source in _SOURCES]
        phases = ", ".join(f"{printable(phase)} {seconds * 1e3:.3g}" for phase, seconds in host.phase_s.items())
        memory = "-" if math.isnan(host.memory_bytes) else format_bytes(host.memory_bytes)
        table.add_row(printable(host.host), f"{host.step_s * 1e3:.3g}", *shares, memory, Text(phases))
    if not hosts:
        table.add_row("-", "-", *("-" for _ in _SOURCES), "-", "no window yet")
    return table


def _faults(seen: LiveSnapshot, room: int) -> Iterator[Text]:
    if not seen.faults:
        yield Text("no faults", style="dim")
    for line in seen.faults[-room:]:
        yield Text(fault_line(line), style="red" if line.kind == "generation_lost" else "")


def _cut(text: Text, width: int, *, is_unicode: bool) -> Text:
    text.truncate(width, overflow="ellipsis" if is_unicode else "crop")
    return text


def _figure(name: str, value: float | None, form: str) -> str:
    return "" if value is None or not math.isfinite(value) else f"{name} {value:{form}}"


def _share(name: str, value: float | None) -> str:
    return "" if value is None else f"{name} {value:.1%}"


def _spark(values: Sequence[float], *, is_unicode: bool, num: int = 16) -> str:
    """The newest values as small bars; nothing where a terminal cannot show them."""
    shown = values[-num:]
    if not is_unicode or len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%H:%M:%S")
