"""What was compiled, as text for a person."""

from __future__ import annotations

from podembed.orchestrator.api.text import columns, format_bytes, format_duration, plural, printable
from podembed.tools.preflight.account import ProgramAccount
from podembed.tools.preflight.compiling import SliceAccount

_FOOT = "Bounds follow from the chips' published rates. Nothing ran on a TPU: real steps take longer."
_MOST_PLACES = 6
_PARTS = {
    "arithmetic": "arithmetic",
    "memory": "the chip's memory",
    "links": "links between chips",
    "host": "the way to the host",
}


def render(found: list[SliceAccount]) -> str:
    """All slices, one below the other, with what is wrong."""
    return printable("\n\n".join([*(_slice(account) for account in found), _FOOT]))


def problems(account: SliceAccount) -> list[str]:
    """What keeps the job from running on the slice, a sentence each."""
    if account.refusal:
        return [account.refusal]
    rates, found = account.wanted.rates, []
    room = rates.memory_bytes // rates.devices
    for program in account.programs:
        if program.memory_bytes > room:
            found.append(f"{program.name} takes {format_bytes(program.memory_bytes)} of {format_bytes(room)}.")
    for name, why in account.failures.items():
        found.append(f"{name} does not compile: {_shortened(why)}")
    if len(found) > len(account.failures) or any("RESOURCE_EXHAUSTED" in why for why in account.failures.values()):
        found.append(_remedy(account))
    return found


def flaws(account: SliceAccount) -> list[str]:
    """What programs contain that they should not, a sentence each. They run all the same."""
    return [f"{program.name} contains {flaw}" for program in account.programs for flaw in program.flaws]


def _remedy(account: SliceAccount) -> str:
    """What takes the memory of a device, and what would help."""
    tables, dense = account.table_bytes, account.dense_bytes
    held = (
        f"Tables take {format_bytes(tables)} of each device, and parameters with their optimizer {format_bytes(dense)}."
    )
    if tables > dense and tables > account.wanted.rates.memory_bytes // 4:
        return f"{held} Keep large tables on hosts (TableConfig(place='host'))."
    if dense > account.wanted.rates.memory_bytes // 4:
        return f"{held} Cut parameters over devices (--mesh data=1,model=4), or train them in bfloat16."
    samples = plural(account.samples_per_device, "sample")
    return (
        f"{held} The rest comes from {samples} a device. Use a smaller batch, more chips, or compute_dtype='bfloat16'."
    )


def _shortened(why: str) -> str:
    lines = [line.strip() for line in why.strip().splitlines() if line.strip()]
    return " ".join(lines[:3])[:600]


def _slice(account: SliceAccount) -> str:
    wanted, rates = account.wanted, account.wanted.rates
    slices = f"{account.num_slices} slices of " if account.num_slices > 1 else ""
    if account.refusal:
        return f"{wanted.name}:\n  ! {account.refusal}"
    each = f"{plural(account.samples_per_device, 'sample')} and {format_bytes(rates.memory_bytes // rates.devices)}"
    lines = [
        f"{slices}{wanted.name}: {account.num_devices} x {account.kind} on {plural(account.num_hosts, 'host')}, "
        f"each with {each} of memory"
    ]
    lines += _places(account)
    rows = [
        ("program", "compiled in", "memory", "temporaries", "flops", "memory traffic", "sends", "from and to host", "")
    ]
    rows += [_row(program, account) for program in account.programs]
    if account.programs:
        lines.append(columns(rows))
    for program in account.programs:
        for one in program.collectives:
            lines.append(
                f"  {program.name}: {one.count} {one.kind}, {format_bytes(one.size_bytes)} among {one.group} devices"
            )
    training = [program for program in account.programs if program.name.startswith("train")]
    if training:
        part, seconds = max((program.bound(rates) for program in training), key=lambda bound: bound[1])
        lines.append(
            f"  bound by {_PARTS[part]}: at most {training[0].num_samples / seconds:,.0f} samples a second, before "
            "what hosts do"
        )
    if account.programs and rates.host_bytes_s is None:
        lines.append("  the rate between these chips and their host is not published, so it bounds nothing here")
    lines += [f"  ! {sentence}" for sentence in (*problems(account), *flaws(account))]
    return "\n".join(lines)


def _places(account: SliceAccount) -> list[str]:
    """Where tables with place='auto' lie, those on hosts first."""
    found = sorted(account.places.items(), key=lambda item: item[1][0] != "host")
    lines = [f"  {name} on {'hosts' if place == 'host' else 'devices'}: {why}" for name, (place, why) in found]
    return lines if len(lines) <= _MOST_PLACES else [*lines[:_MOST_PLACES], f"  ... {len(lines) - _MOST_PLACES} more"]


def _row(program: ProgramAccount, account: SliceAccount) -> tuple[str, ...]:
    part, seconds = program.bound(account.wanted.rates)
    return (
        program.name,
        f"{program.compile_s:.1f} s",
        format_bytes(program.memory_bytes),
        format_bytes(program.temporary_bytes),
        f"{program.flops:.2e}",
        format_bytes(program.memory_traffic_bytes),
        format_bytes(program.sent_bytes),
        f"{format_bytes(program.to_device_bytes)}, {format_bytes(program.to_host_bytes)}",
        f"at least {_seconds(seconds)} ({part})",
    )


def _seconds(seconds: float) -> str:
    """`17.3 us`, `2.1 ms`, or as durations are written."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.3g} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else format_duration(seconds)
