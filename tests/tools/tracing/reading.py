"""A trace as Perfetto reads it: by the schema of the package `perfetto`, track by track."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as format_of

KNOWN = "what is known of this process"


@dataclass(frozen=True)
class Slice:
    """`parent` is the name of the slice around it, or empty."""

    name: str
    began_ns: int
    ended_ns: int
    parent: str
    values: dict[str, Any]


@dataclass
class TracedProcess:
    facts: dict[str, Any] = field(default_factory=dict)
    tracks: dict[str, list[Slice]] = field(default_factory=dict)

    def named(self, name: str) -> list[Slice]:
        """The slices of all tracks with this name."""
        return [one for slices in self.tracks.values() for one in slices if one.name == name]


def read_trace(data: bytes) -> dict[str, TracedProcess]:
    """Processes by their names. Ends match begins, and time never goes back within a track."""
    trace = format_of.Trace()
    trace.ParseFromString(data)
    assert unknown(trace) == []
    processes: dict[int, TracedProcess] = {}
    names: dict[int, str] = {}
    tracks: dict[int, list[Slice]] = {}
    running: dict[int, list[Any]] = {}
    last_ns: dict[int, int] = {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            if track.HasField("process"):
                processes[track.uuid], names[track.uuid] = TracedProcess(), track.process.process_name
            else:
                tracks[track.uuid] = processes[track.parent_uuid].tracks.setdefault(track.name, [])
                assert not tracks[track.uuid]
        elif packet.HasField("track_event"):
            event, uuid = packet.track_event, packet.track_event.track_uuid
            assert packet.timestamp >= last_ns.get(uuid, 0)
            last_ns[uuid] = packet.timestamp
            if event.type == event.TYPE_INSTANT:
                assert event.name == KNOWN
                processes[uuid].facts = _values(event)
            elif event.type == event.TYPE_SLICE_BEGIN:
                running.setdefault(uuid, []).append((packet.timestamp, event))
            else:
                assert event.type == event.TYPE_SLICE_END
                began_ns, begun = running[uuid].pop()
                around = running[uuid][-1][1].name if running[uuid] else ""
                tracks[uuid].append(Slice(begun.name, began_ns, packet.timestamp, around, _values(begun)))
    assert not any(running.values())
    assert len({*names.values()}) == len(names)
    return {names[uuid]: process for uuid, process in processes.items()}


def unknown(message: Any) -> list[int]:
    """Numbers of fields that the schema does not have, here and inside."""
    found = [one.field_number for one in UnknownFieldSet(message)]
    for field_of, value in message.ListFields():
        if field_of.type == field_of.TYPE_MESSAGE:
            found += [number for one in (value if field_of.is_repeated else [value]) for number in unknown(one)]
    return found


def _values(event: Any) -> dict[str, Any]:
    return {one.name: getattr(one, one.WhichOneof("value")) for one in event.debug_annotations}
