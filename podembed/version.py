"""Which version of the program runs: that of the copy whose modules are loaded, where several are installed."""

from __future__ import annotations

import os

import podembed

NAME = "podembed"
UNKNOWN = "unknown"


def checkout() -> str:
    """The folder of the checkout that runs; empty for an installed package."""
    root = _folder()
    return root if _version_of_project(root) else ""


def version() -> str:
    """Such as `0.1.0`: of a checkout what its pyproject.toml says, of an installed package what lies beside it.

    A copy without either, as of the bare package folder, is `unknown`.
    """
    # Imported late: every command imports this module, and few ask.
    from importlib import metadata

    root = _folder()
    # Not `metadata.version`, which finds the first one on the search path, and that may be another copy's.
    installed = next(iter(metadata.distributions(name=NAME, path=[root])), None)
    return _version_of_project(root) or (installed.version if installed else UNKNOWN)


def describe() -> str:
    """The line that `podembed --version` prints."""
    place = checkout()
    return f"{NAME} {version()}" + (f" (checkout {place})" if place else "")


def pages() -> str:
    """The folder of the pages that messages name as docs/NAME.md: a wheel has them within the package."""
    inside = os.path.join(os.path.dirname(os.path.abspath(podembed.__file__)), "docs")
    # Where git makes no links, a file stands in the place of the folder.
    return inside if os.path.isdir(inside) else os.path.join(_folder(), "docs")


def _folder() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(podembed.__file__)))


def _version_of_project(folder: str) -> str:
    """What a pyproject.toml of ours in the folder says; empty without one, or if it is another program's."""
    import tomllib

    try:
        with open(os.path.join(folder, "pyproject.toml"), "rb") as file:
            project = tomllib.load(file).get("project", {})
    except (OSError, tomllib.TOMLDecodeError):
        return ""
    return str(project.get("version", UNKNOWN)) if project.get("name") == NAME else ""
