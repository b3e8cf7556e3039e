"""Nested structures: any nesting of dicts, lists, tuples and namedtuples over leaves, with a path to each leaf.

Everything else is a leaf, None included. Dicts are walked in the sorted order of their keys, so the flat order does not
depend on how a dict was built. Sequences are walked in their order. A path joins keys and positions with "/", as in
"clicks/0"; that of a single leaf is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any


def flatten_with_paths(structure: Any) -> list[tuple[str, Any]]:
    """The leaves in order, each with its path."""
    if _is_flat_dict(structure):
        return [(str(key), structure[key]) for key in sorted_keys(structure)]
    return list(_walk(structure, ()))


def flatten(structure: Any) -> list[Any]:
    """The leaves in order."""
    if _is_flat_dict(structure):
        return [structure[key] for key in sorted_keys(structure)]
    return [leaf for _, leaf in _walk(structure, ())]


def pack_like(structure: Any, leaves: Sequence[Any]) -> Any:
    """The leaves, in flat order, in the nesting and the types of `structure`."""
    return map_leaves(structure, iter(leaves).__next__)


def map_leaves(structure: Any, make_leaf: Callable[[], Any]) -> Any:
    """The nesting of `structure` with each leaf, in flat order, replaced by a call of `make_leaf`."""
    if not is_nested(structure):
        return make_leaf()
    if isinstance(structure, Mapping):
        made = {key: map_leaves(structure[key], make_leaf) for key in sorted_keys(structure)}
        # In the order in which the original iterates, which is what a reader of the result expects.
        return _rebuilt_mapping(structure, {key: made[key] for key in structure})
    if _is_namedtuple(structure):
        return type(structure)(*(map_leaves(child, make_leaf) for child in structure))
    return type(structure)([map_leaves(child, make_leaf) for child in structure])


def require_same_structure(expected: Any, found: Any, what: str) -> None:
    """Compares two structures, leaves aside.

    Args:
      what: the name of `found` in messages, such as "gradients".

    Raises:
      TypeError: a sequence of another type than expected, such as a list for a tuple.
      ValueError: another length, other keys, or a leaf in place of a sequence or the other way round.
    """
    if _is_flat_dict(expected) and _is_flat_dict(found) and expected.keys() == found.keys():
        return
    _compare(expected, found, what, ())


def leaves_of_replicas(structures: Sequence[Any], *, what: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Each path, in order, with the leaves of all replicas. Types of sequences and of dicts are not compared, names of
    leaves are.

    Args:
      structures: one for each replica.
      what: they are, in messages.

    Raises:
      ValueError: replicas have leaves of other paths.
    """
    of_replicas = [flatten_with_paths(structure) for structure in structures]
    paths = [[path for path, _ in leaves] for leaves in of_replicas]
    for replica, found in enumerate(paths):
        if found != paths[0]:
            raise ValueError(
                f"Found {what} with leaves {found} on replica {replica}. Expected {paths[0]}, as on replica 0. Let all "
                "replicas have one structure."
            )
    return [(path, tuple(leaves[at][1] for leaves in of_replicas)) for at, path in enumerate(paths[0])]


def sorted_keys(structure: Mapping[Any, Any]) -> list[Any]:
    """The keys in the order in which a dict is walked.

    Raises:
      TypeError: they cannot be sorted.
    """
    try:
        return sorted(structure)
    except TypeError as error:
        raise TypeError(
            f"Found a dict with keys {list(structure)!r}. Expected keys that can be sorted, since they give the order "
            "of the features. Use strings."
        ) from error


def _is_flat_dict(structure: Any) -> bool:
    """A dict of leaves, which most structures are. Each step asks several times, so these get by without recursion."""
    return type(structure) is dict and not any(map(is_nested, structure.values()))


def _walk(structure: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if not is_nested(structure):
        yield "/".join(path), structure
        return
    for key, child in _children(structure):
        yield from _walk(child, (*path, key))


def _children(structure: Any) -> list[tuple[str, Any]]:
    if isinstance(structure, Mapping):
        return [(str(key), structure[key]) for key in sorted_keys(structure)]
    if _is_namedtuple(structure):
        return list(zip(structure._fields, structure, strict=True))
    return [(str(at), child) for at, child in enumerate(structure)]


def _compare(expected: Any, found: Any, what: str, path: tuple[str, ...]) -> None:
    _require_same_kind(expected, found, what, path)
    if not is_nested(expected):
        return
    if isinstance(expected, Mapping):
        _compare_keys(expected, found, what, path)
        for key in sorted_keys(expected):
            _compare(expected[key], found[key], what, (*path, str(key)))
        return
    # Elements before their number, as TensorFlow does: another type inside is a TypeError also where the length differs
    # as well.
    for (key, one), other in zip(_children(expected), found, strict=False):
        _compare(one, other, what, (*path, key))
    _require_same_length(expected, found, what, path)


def _require_same_kind(expected: Any, found: Any, what: str, path: tuple[str, ...]) -> None:
    if is_nested(expected) != is_nested(found):
        raise ValueError(
            f"The structure of {what} differs{_at(path)}: found {_describe(found)}. Expected {_describe(expected)}, as "
            "in feature_config. Nest it like feature_config."
        )
    if is_nested(expected) and not _same_type(expected, found):
        raise TypeError(
            f"The structure of {what} differs{_at(path)}: found a {_type_name(found)}. Expected a "
            f"{_type_name(expected)}, as in feature_config. Convert it."
        )


def _require_same_length(expected: Any, found: Any, what: str, path: tuple[str, ...]) -> None:
    if len(expected) != len(found):
        raise ValueError(
            f"The structure of {what} differs{_at(path)}: found {len(found)} elements. Expected {len(expected)}, as in "
            "feature_config. Pass one for each."
        )


def _compare_keys(expected: Mapping[Any, Any], found: Mapping[Any, Any], what: str, path: tuple[str, ...]) -> None:
    if set(expected) != set(found):
        missing = sorted(map(str, set(expected) - set(found)))
        unknown = sorted(map(str, set(found) - set(expected)))
        raise ValueError(
            f"The structure of {what} differs{_at(path)}: found unknown keys {unknown} and missing keys {missing}. "
            f"Expected {sorted(map(str, expected))}, as in feature_config. Pass exactly these."
        )


def _same_type(expected: Any, found: Any) -> bool:
    if isinstance(expected, Mapping):
        return isinstance(found, Mapping)
    if _is_namedtuple(expected) and _is_namedtuple(found):
        # Two definitions of one namedtuple, as after a reload of its module, are one type.
        return type(expected).__name__ == type(found).__name__ and expected._fields == found._fields
    if _is_namedtuple(expected) or _is_namedtuple(found):
        return False
    return isinstance(found, list) == isinstance(expected, list) and not isinstance(found, Mapping)


def is_nested(structure: Any) -> bool:
    """Whether a value has leaves, or else is one."""
    return _is_nested_type(type(structure))


@lru_cache(maxsize=256)
def _is_nested_type(kind: type) -> bool:
    # A `dok` matrix of scipy is a dict, and yet one value.
    return issubclass(kind, Mapping | list | tuple) and not kind.__module__.startswith("scipy.")


def _is_namedtuple(structure: Any) -> bool:
    return isinstance(structure, tuple) and hasattr(structure, "_fields")


def _rebuilt_mapping(structure: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    if isinstance(structure, dict) and hasattr(structure, "default_factory"):
        return type(structure)(structure.default_factory, made)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    return type(structure)(made) if type(structure) is not dict else made  # pyright: ignore[reportCallIssue]


def _at(path: tuple[str, ...]) -> str:
    return f" at '{'/'.join(path)}'" if path else ""


def _type_name(structure: Any) -> str:
    """Two namedtuples may have one name and other fields."""
    fields = f"({', '.join(structure._fields)})" if _is_namedtuple(structure) else ""
    return f"{type(structure).__name__}{fields}"


def _describe(structure: Any) -> str:
    if is_nested(structure):
        return f"a {type(structure).__name__} of {len(structure)}"
    return "a single value" if structure is not None else "None"
