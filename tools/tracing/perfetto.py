"""A trace in the format of Perfetto: a `perfetto.protos.Trace` of track descriptors and track events.

It is written without a library: eight kinds of messages of numbers, texts and messages are all that it takes. Tests
read it back by the format's own schema. Numbers of fields are those of `protos/perfetto/trace/` in Perfetto's sources.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from podembed.workers.tracing.recorder import JAX_TRACK, Span

# TrackEvent.Type
_BEGIN, _END, _INSTANT = 1, 2, 3
# TrackDescriptor.ChildTracksOrdering
_EXPLICIT = 3
# TracePacket.SequenceFlags: nothing before it is needed to read what follows.
_STATE_CLEARED = 1
_SEQUENCE = 1
_TRACKS_A_PROCESS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedProcess:
    """A process of a trace.

    Attributes:
      name: such as `host 1`.
      facts: what is known of it, such as its machine and its clock.
      spans: by its own clock.
      offset_s: to be subtracted from its times.
    """

    name: str
    spans: Sequence[Span]
    offset_s: float = 0.0
    facts: Mapping[str, int | float | str] = field(default_factory=dict)


def trace_bytes(processes: Sequence[TracedProcess]) -> bytes:
    """The file. Times in it are nanoseconds of the first process's clock."""
    return b"".join(_text(1, packet) for packet in _packets(processes))


def _packets(processes: Sequence[TracedProcess]) -> Iterator[bytes]:
    began_ns = min((_ns(span.began_s, one) for one in processes for span in one.spans), default=0)
    yield _number(10, _SEQUENCE) + _number(13, _STATE_CLEARED)
    for number, process in enumerate(processes, 1):
        own = number * _TRACKS_A_PROCESS
        # Several machines may use the same process id, and Perfetto would make one process of two.
        described = _number(1, number) + _text(6, process.name)
        described += b"".join(_text(8, f"{name}: {value}") for name, value in process.facts.items())
        yield _track(_number(1, own) + _text(3, described) + _number(11, _EXPLICIT) + _number(12, number))
        yield _event(began_ns, own, _INSTANT, "what is known of this process", process.facts)
        for rank, (name, spans) in enumerate(_lanes(process.spans)):
            uuid = own + rank + 1
            yield _track(_number(1, uuid) + _text(2, name) + _number(5, own) + _number(12, rank))
            yield from _slices(uuid, spans, process)


def _slices(uuid: int, spans: Sequence[Span], process: TracedProcess) -> Iterator[bytes]:
    """Begins and ends of spans that lie in or behind each other, in order of time."""
    open_ends: list[int] = []
    for span in spans:
        began_ns, ended_ns = _ns(span.began_s, process), _ns(span.ended_s, process)
        while open_ends and open_ends[-1] <= began_ns:
            yield _event(open_ends.pop(), uuid, _END)
        yield _event(began_ns, uuid, _BEGIN, span.name, span.values)
        open_ends.append(min([ended_ns, *open_ends[-1:]]))
    while open_ends:
        yield _event(open_ends.pop(), uuid, _END)


def _lanes(spans: Iterable[Span]) -> list[tuple[str, list[Span]]]:
    """The spans of each track, in order. Spans that overlap in part, as those of several threads do, get one more track
    of that name. What JAX saw comes last, since it has many tracks.
    """
    lanes: dict[str, list[tuple[list[Span], list[float]]]] = {}
    for span in sorted(spans, key=lambda one: (one.began_s, -one.ended_s)):
        of_track = lanes.setdefault(span.track, [])
        for lane in of_track:
            ends = lane[1]
            while ends and ends[-1] <= span.began_s:
                ends.pop()
            if not ends or span.ended_s <= ends[-1]:
                break
        else:
            of_track.append(lane := ([], []))
        lane[0].append(span)
        lane[1].append(span.ended_s)
    return [
        (f"{track} ({number})" if number else track, own)
        for track, of_track in sorted(lanes.items(), key=lambda one: one[0].startswith(JAX_TRACK))
        for number, (own, _) in enumerate(of_track)
    ]


def _ns(seconds: float, process: TracedProcess) -> int:
    return max(0, round((seconds - process.offset_s) * 1e9))


def _track(descriptor: bytes) -> bytes:
    return _number(10, _SEQUENCE) + _text(60, descriptor)


def _event(
    at_ns: int, uuid: int, kind: int, name: str = "", values: Mapping[str, int | float | str] | None = None
) -> bytes:
    event = _number(9, kind) + _number(11, uuid)
    if name:
        event += _text(23, name)
    for key, value in (values or {}).items():
        event += _text(4, _text(10, key) + _annotation(value))
    return _number(8, at_ns) + _number(10, _SEQUENCE) + _text(11, event)


def _annotation(value: int | float | str) -> bytes:
    if isinstance(value, str):
        return _text(6, value)
    if isinstance(value, int):
        return _number(4, value)
    return _key(5, 1) + struct.pack("<d", value)


def _text(number: int, value: bytes | str) -> bytes:
    """A field of text, or of a message."""
    data = value.encode() if isinstance(value, str) else value
    return _key(number, 2) + _varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    return _key(number, 0) + _varint(value)


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    # A negative number is written as its two's complement of 64 bits.
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
