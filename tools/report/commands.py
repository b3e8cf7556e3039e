"""Commands that go on with a run, use it, or do it again."""

from __future__ import annotations

import json
import shlex
from typing import Any

from podembed.tools.report.material import Material

_OWN = "podembed."
Command = tuple[str, str, str]


def commands_of(material: Material) -> list[Command]:
    """Title, command and a note, which may be empty."""
    location = material.description.location
    run = shlex.quote(location)
    record, head = material.description.record, material.description.head
    found: list[Command] = []
    if record is not None and not record.is_imported and record.job_function:
        hosts = int(material.last("hosts") or (head.manifest.hosts if head and head.manifest else 1))
        is_own = record.job_function.startswith(_OWN)
        note = "" if is_own else "Call it in the folder in which the job's module is found."
        machines = _slices(material) or f"--hosts {hosts}"
        found.append(("Resume", f"podembed resume {run} {machines}", note))
        job = f"--job {shlex.quote(record.job_function)}{_settings(record.job_arguments)}"
        words = (
            "The same data, versions and steps give the same tables. Flags on steps, commits and evaluations are not "
            f"part of the run's record. {note}"
        )
        found.append(("Reproduce", f"podembed train {job} {machines}", words.strip()))
        if record.warm_start is not None:
            rules = "".join(f" {shlex.quote(rule)}" for rule in record.warm_start.rules)
            start = shlex.quote(f"{record.warm_start.location}@{record.warm_start.commit}")
            title, line, words = found[-1]
            found[-1] = (title, f"{line} --warm-start {start}{f' --warm-start-rules{rules}' if rules else ''}", words)
    if head is not None:
        commit = shlex.quote(f"{location}@{head.name}")
        found += [
            ("Serve", f"podembed export-model {commit} --out model", "It writes files that score without podembed."),
            ("Judge", f"podembed evaluate {commit}", ""),
        ]
    return [*found, ("Look inside", f"podembed inspect {run}", ""), ("Check every byte", f"podembed fsck {run}", "")]


def _slices(material: Material) -> str:
    """Flags of the last driver that trained on slices of TPUs, or did not; empty where hosts are counted."""
    begun = material.events("generation_started")
    slices: Any = begun[-1].values.get("slices") if begun else None
    try:
        low, high = map(int, slices["num_slices"])
        given = {"topology": slices["topology"], "accelerator-type": slices["accelerator_type"]}
        given["slices"] = f"{low}" if low == high else f"{low}-{high}"
        given |= {"platform": slices["platform"]} if slices["platform"] else {}
    except (TypeError, KeyError, ValueError):
        # Hosts are counted, or an older version has written the event.
        return ""
    return " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in given.items())


def _settings(arguments: str) -> str:
    try:
        named = json.loads(arguments or "{}")
    except ValueError:
        named = {}
    if not isinstance(named, dict) or not named:
        return ""
    words = [shlex.quote(f"{name}={json.dumps(value)}") for name, value in named.items()]
    return " --set " + " ".join(words)
