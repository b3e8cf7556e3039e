"""A job by the name of the function that returns it: what the command line is given and what a run records.

`JobReference.resolve` imports the module and calls the function. A run folder may come from anywhere, so only a
function that declares to return a `JobConfig` is called, with plain values.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from podembed.embedding.device_places import AutoPlace
from podembed.workers.job.auto_places import with_places
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.typo_hints import typo_hint
from podembed.workers.storage.strict_json import DocumentRefused, parse_strictly

# Packages whose constructors say themselves what is wrong with their arguments.
_DECLARING = ("podembed.embedding", "podembed.workers", "podembed.orchestrator", "podembed.serving")
# Where the jobs that come with the program lie, and the package under which earlier versions recorded them.
_OURS, _OURS_BEFORE = "podembed.jobs.", "jobs."
_MOVED = {"jobs.chaos_job": "podembed.jobs.chaos.jobs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReference:
    """A job by the name of the function that returns it: `module:function` and its keyword arguments.

    Attributes:
      function: `package.module:function`.
      arguments: plain JSON values.
      folder: where the module may lie if it is not installed; searched after everything else. Not a part of the run's
        record.
      initial_accumulator_value: what the run recorded of `JobConfig.initial_accumulator_value`, in place of what the
        function returns; None before there is a run.
      places: places of tables with place='auto', by their names, once they were chosen.
    """

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    initial_accumulator_value: float | None = None
    places: Mapping[str, AutoPlace] = field(default_factory=dict)

    def resolve(self) -> JobConfig:
        """Imports the module, calls the function and returns its job.

        A run's folder names its job, and a folder may come from anywhere: only a function that declares `-> JobConfig`
        is called.

        Raises:
          JobError: the name does not lead to such a function, or the function does not take these arguments.
        """
        module_name, _, function_name = self.function.partition(":")
        if not module_name or module_name.startswith(".") or not function_name:
            raise JobError(
                f"Found job '{self.function}'. Expected package.module:function, such as my_package.my_module:my_job."
            )
        if self.folder:
            search_last(self.folder, for_package=module_name.partition(".")[0])
        name = module_name
        try:
            name = _current_name(module_name)
            module = importlib.import_module(name)
        except Exception as error:
            hint = typo_hint(error, name)
            if hint is None and not isinstance(error, ImportError):
                raise
            raise JobError(
                hint
                or f"Found job '{self.function}', which cannot be imported ({error}). Expected "
                "package.module:function. Run from the folder that holds the module, or install it."
            ) from error
        function = getattr(module, function_name, None)
        if function is None:
            raise JobError(_no_function(module, function_name))
        _check_function(self.function, function)
        _check_arguments(self.function, function, self.arguments)
        _check_plain(self.function, self.arguments)
        try:
            job = function(**self.arguments)
        except Exception as error:
            where = _place_of_declaration(error)
            told = f"{error} Job '{self.function}' declares it in {where}." if where else typo_hint(error, name)
            if told is None:
                raise
            raise JobError(told) from error
        if not isinstance(job, JobConfig):
            raise JobError(f"Job '{self.function}' returned a {type(job).__name__}. Expected a JobConfig.")
        if self.initial_accumulator_value is not None:
            job = replace(job, initial_accumulator_value=self.initial_accumulator_value)
        if self.places:
            job = with_places(job, self.places)
        return job

    def to_json(self) -> dict[str, Any]:
        return {"function": self.function, "arguments": json.loads(json.dumps(dict(self.arguments)))}


AnyJob = JobConfig | JobReference
"""What workers get: the job itself, or its name where it does not travel between processes."""


def _current_name(module: str) -> str:
    """The name of a job's module today: earlier versions recorded our jobs as `jobs.criteo`, without `podembed`.

    A user's own package `jobs` keeps its name.
    """
    if not module.startswith(_OURS_BEFORE):
        return module
    ours = _spec(_MOVED.get(module, _OURS + module.removeprefix(_OURS_BEFORE)))
    found = _spec(module)
    if ours is None or (found is not None and not _is_same_file(ours.origin, found.origin)):
        return module
    return ours.name


def _spec(module: str) -> ModuleSpec | None:
    """The place of a module; None if it or a package above it is not found.

    Raises:
      ModuleNotFoundError: a package above it is there, and imports something that is not.
    """
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        return None


def _is_same_file(first: str | None, second: str | None) -> bool:
    # In a checkout, the folder of our jobs lies where a user's would.
    return first is not None and second is not None and os.path.realpath(first) == os.path.realpath(second)


def _place_of_declaration(error: Exception) -> str | None:
    """Where a job's function called what refused its arguments, if that was a declaration of ours, whose words say what
    to mend. None for an error of the function's own, which its traceback explains.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    names = [".".join(str(frame.f_globals.get("__name__", "")).split(".")[:2]) for frame, _ in frames]
    if type(error) not in (ValueError, TypeError) or names[-1] not in _DECLARING or not str(error).startswith("Found "):
        return None
    at = next((at for at in reversed(range(len(frames))) if names[at] not in _DECLARING), None)
    return None if at is None else f"{frames[at][0].f_code.co_filename}, line {frames[at][1]}"


def _no_function(module: ModuleType, wanted: str) -> str:
    """What is wrong where a module has no such name, with the jobs that it has."""
    jobs = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and _declares_job(value)
    ]
    remedy = "Write one that declares `-> JobConfig`."
    if jobs:
        remedy = f"It has {', '.join(jobs)}: pass {module.__name__}:{jobs[0]}, or correct the name."
    return (
        f"Found no '{wanted}' in the module {module.__name__} ({getattr(module, '__file__', 'a package')}). Expected a "
        f"function that returns a JobConfig. {remedy}"
    )


def _declares_job(function: Callable[..., Any]) -> bool:
    declared = inspect.signature(function).return_annotation
    # With `from __future__ import annotations` the declaration is text.
    is_text = isinstance(declared, str) and declared.strip("'\"").rpartition(".")[2] == JobConfig.__name__
    return declared is JobConfig or is_text


def _check_function(name: str, function: Any) -> None:
    if not inspect.isfunction(function):
        raise JobError(f"Found '{name}', a {type(function).__name__}. Expected a function that returns a JobConfig.")
    if not _declares_job(function):
        raise JobError(
            f"Found job '{name}' without a declared JobConfig. Expected `def {function.__name__}(...) -> JobConfig:`, "
            "since only such a function is called by name. Declare it."
        )


def _check_arguments(name: str, function: Any, arguments: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        files = ""
        if "data" in signature.parameters and "data" not in arguments:
            files = " Pass data files as --data GLOB."
        raise JobError(
            f"Found arguments {sorted(arguments)} for job '{name}' ({error}). Expected some of "
            f"{', '.join(signature.parameters) or 'none'}. "
            f"Give them as --set name=value, or in JobReference(arguments=...).{files}"
        ) from error
    for argument, value in arguments.items():
        declared = signature.parameters[argument].annotation if argument in signature.parameters else None
        # With `from __future__ import annotations` the declaration is text.
        kinds = {
            part.strip()
            for part in (declared if isinstance(declared, str) else getattr(declared, "__name__", "")).split("|")
        }
        if kinds and kinds <= _PLAIN_KINDS.keys() and not any(_is_a(value, kind) for kind in kinds):
            # Settings of the command line are JSON, whose words differ from those of Python.
            words = {"True": "true", "False": "false", "None": "null"}
            json_text = words.get(value, "VALUE") if isinstance(value, str) else "VALUE"
            raise JobError(
                f"Found {argument}={value!r} for job '{name}'. Expected {' or '.join(sorted(kinds))}. Give it as --set "
                f"{argument}={json_text}, which is JSON, or in JobReference(arguments=...)."
            )


def _check_plain(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuses what a run's record could not give back: it is written with them, and a run whose record no program can
    read is stuck.
    """
    for argument, value in arguments.items():
        try:
            parse_strictly(argument, json.dumps(value).encode())
        except (TypeError, ValueError, DocumentRefused) as error:
            found = error.found if isinstance(error, DocumentRefused) else str(error)
            raise JobError(
                f"Found {argument}={value!r} for job '{name}' ({found}). Expected plain JSON values: text, finite "
                "numbers, True, False, None, and "
                f"lists and dictionaries of them, since the run's record keeps them. Give another value."
            ) from error


# Declarations that are simple enough to be checked before the function runs; a whole number will do for a float.
_PLAIN_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
}


def _is_a(value: Any, kind: str) -> bool:
    return isinstance(value, _PLAIN_KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))


class _LastFolder:
    """Finds modules and packages that lie directly in a folder; what is in such a package, Python finds itself.

    On the search path, even as its last folder, it would come before namespace packages and whatever import hooks find.
    Any file in it could then stand in for a module of an installed package.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        # Modules of Python for other systems are imported, too, by libraries that expect to miss them here.
        if path is not None or name in sys.stdlib_module_names:
            return None
        return PathFinder.find_spec(name, [self.folder], target)


def search_last(folder: str, *, for_package: str) -> None:
    """Lets modules be found in a folder from now on, unless the package is found without it."""
    known = [finder.folder for finder in sys.meta_path if isinstance(finder, _LastFolder)]
    if folder not in known and not _is_found(for_package):
        sys.meta_path.append(_LastFolder(folder))


def _is_found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        # A module that was made in another way than from a file.
        return package in sys.modules
