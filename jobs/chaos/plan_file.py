"""Plans of faults and what struck, as files and as text. What a plan may hold is `workers.faults.plan`'s business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from podembed.workers.faults.inject import FaultRecord
from podembed.workers.faults.plan import Fault, FaultPlan, FaultPlanError
from podembed.workers.storage.strict_json import DocumentRefused, canonical_bytes, parse_strictly

MAX_PLAN_BYTES = 1 << 20
MAX_RECORD_BYTES = 1 << 14


def parse_plan(name: str, data: bytes) -> FaultPlan:
    """The plan in a JSON document: `{"folder": "...", "faults": [{"point": "...", "action": "...", ...}, ...]}`.

    Raises:
      FaultPlanError: unknown members, points, actions or arguments, or values of a wrong type.
    """
    try:
        document = parse_strictly(name, data, max_bytes=MAX_PLAN_BYTES)
    except DocumentRefused as error:
        raise FaultPlanError(str(error)) from error
    members = _members(name, document, {"folder", "faults"})
    folder, faults = members.get("folder"), members.get("faults", [])
    if not isinstance(folder, str) or not folder or not isinstance(faults, list):
        raise FaultPlanError(f"{name}: found no folder or no list of faults. Expected a path and a list.")
    return FaultPlan(folder=folder, faults=tuple(_fault(name, at, entry) for at, entry in enumerate(faults)))


def read_plan(path: str) -> FaultPlan:
    """The plan in a file.

    Raises:
      FaultPlanError: it cannot be read or is no plan.
    """
    try:
        return parse_plan(path, Path(path).read_bytes())
    except OSError as error:
        raise FaultPlanError(f"Found no fault plan at {path} ({error.strerror}). Expected a JSON file.") from error


_TYPES: Mapping[str, tuple[type, ...]] = {
    "point": (str,),
    "action": (str,),
    "rank": (str,),
    "step": (int,),
    "nth": (int,),
    "times": (int,),
    "for_s": (int, float),
    "match": (str,),
    "after": (int,),
    "arguments": (dict,),
}


def _fault(name: str, at: int, entry: Any) -> Fault:
    members = _members(f"{name}, fault {at}", entry, set(_TYPES))
    for member, value in members.items():
        if isinstance(value, bool) or not isinstance(value, _TYPES[member]):
            expected = " or ".join(kind.__name__ for kind in _TYPES[member])
            raise FaultPlanError(f"{name}, fault {at}: found {member}={value!r}. Expected {expected}.")
    if missing := {"point", "action"} - members.keys():
        raise FaultPlanError(f"{name}, fault {at}: found no {' and no '.join(sorted(missing))}. Expected both.")
    return Fault(**members)


def _members(name: str, document: Any, allowed: set[str]) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise FaultPlanError(f"{name}: found a {type(document).__name__}. Expected an object.")
    if unknown := document.keys() - allowed:
        raise FaultPlanError(f"{name}: found {sorted(unknown)}. Expected some of {sorted(allowed)}.")
    return document


def plan_bytes(plan: FaultPlan) -> bytes:
    """The JSON document of a plan, which `parse_plan` reads."""
    return canonical_bytes({"folder": plan.folder, "faults": [_document(fault) for fault in plan.faults]}) + b"\n"


def _document(fault: Fault) -> dict[str, Any]:
    """Its fields, those at their defaults left out."""
    defaults = {"rank": None, "step": None, "nth": 1, "times": 1, "for_s": 0.0, "match": None, "after": None}
    defaults["arguments"] = {}
    values = {entry.name: getattr(fault, entry.name) for entry in fields(fault)}
    return {
        name: dict(value) if name == "arguments" else value
        for name, value in values.items()
        if name not in defaults or value != defaults[name]
    }


def describe(fault: Fault) -> str:
    """One line for a person."""
    where = f"{fault.rank or 'any process'}: " if fault.rank != "driver" else "driver: "
    when = "" if fault.step is None else f" of step {fault.step}"
    hit = f", hit {fault.nth}" if fault.nth > 1 else ""
    often = f", {fault.times} times" if fault.times > 1 else f", for {fault.for_s:g} s" if fault.for_s else ""
    what = f" {dict(fault.arguments)}" if fault.arguments else ""
    hit += "" if fault.after is None else f", after fault {fault.after}"
    return f"{where}{fault.action}{what} at {fault.point}{f' /{fault.match}/' if fault.match else ''}{when}{hit}{often}"


def read_records(folder: str) -> list[FaultRecord]:
    """All faults that struck so far, in the order of time.

    Raises:
      FaultPlanError: a record is damaged.
    """
    records = []
    for path in sorted(Path(folder).glob("fired-*.json")):
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            continue  # Its process is just writing it.
        try:
            document = parse_strictly(path.name, data, max_bytes=MAX_RECORD_BYTES)
            records.append(FaultRecord(**document))
        except (TypeError, DocumentRefused) as error:
            raise FaultPlanError(f"Found a damaged record {path} ({error}). Expected one fault.") from error
    return sorted(records, key=lambda record: record.unix_s)
