"""Two towers in a model: which of its outputs are the vectors of a user and of an item, and these vectors.

No model declares them. They are found by what it answers: an output that stays as it is when other items come, one that
goes with the items, and scores that rise with the products of the two. A pair that was found wrongly would cost recall,
which is measured, and never an exact score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.artifact.exported_model import Samples, scores_among
from podembed.serving.server.item_columns import ItemColumns
from podembed.serving.server.replica import ServedVersion

_MOVES = 8
_CLOSE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerOutputs:
    """Names of outputs.

    Attributes:
      user, item: vectors of one width, `[n, width]`, or with axes of one between.
    """

    user: str
    item: str


def find_towers(
    version: ServedVersion, contexts: Mapping[str, Sequence[Any]], items: Mapping[str, Sequence[Any]]
) -> TowerOutputs | None:
    """The towers of a model, or None.

    Args:
      contexts: columns of some samples.
      items: columns of as many items.

    Raises:
      ConfigurationError: the model has not one score a sample.
      ModelError: columns do not fit the model.
    """
    count = len(next(iter(items.values())))
    moves = min(_MOVES, count)
    found = []
    for move in range(moves):
        moved = {name: [*values[move:], *values[:move]] for name, values in items.items()}
        samples = version.model.read({**contexts, **moved})
        (outputs,) = version.model.score([samples])
        found.append({name: values.astype(np.float32) for name, values in outputs.items()})
    scores = np.stack([scores_of(outputs) for outputs in found])
    vectors = [name for name, values in found[0].items() if values.ndim > 1 and values.shape[-1] == values[0].size]
    users = [name for name in vectors if all(_alike(one[name], found[0][name]) for one in found)]
    own = [name for name in vectors if name not in users]
    owned = [
        name
        for name in own
        if all(_alike(one[name], np.roll(found[0][name], -move, axis=0)) for move, one in enumerate(found))
    ]
    for user in users:
        for item in owned:
            if found[0][user].shape[-1] != found[0][item].shape[-1]:
                continue
            products = np.stack([(vector_of(one, user) * vector_of(one, item)).sum(axis=1) for one in found])
            if _rise_together(products, scores):
                return TowerOutputs(user=user, item=item)
    return None


def vector_of(outputs: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """float32 `[n, width]` of a tower."""
    values = outputs[name]
    return values.reshape(len(values), values.shape[-1])


def item_samples(
    version: ServedVersion, items: ItemColumns, names: Sequence[str], context: Mapping[str, Any]
) -> Iterator[Samples]:
    """All items as samples of one context, a run of the program at once.

    Args:
      names: columns of items that the model reads.
      context: columns of one sample, whichever.

    Raises:
      ModelError: the columns of an item do not fit the model.
    """
    for start in range(0, len(items), version.most_samples):
        places = np.arange(start, min(start + version.most_samples, len(items)))
        yield version.model.read({**context, **items.columns(places, names)}, with_context=True)


def item_vectors(version: ServedVersion, towers: TowerOutputs, samples: Iterator[Samples]) -> np.ndarray:
    """float32 `[items, width]`, the vectors of items."""
    found = (version.model.score([one])[0] for one in samples)
    return np.concatenate([vector_of(outputs, towers.item).astype(np.float32) for outputs in found])


def scores_of(outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """`[n]`, the scores among outputs.

    Raises:
      ConfigurationError: there is not one a sample.
    """
    scores = scores_among(dict(outputs))
    if isinstance(scores, Mapping) and len(scores) == 1:
        (scores,) = scores.values()
    if isinstance(scores, Mapping) or scores[:1].size != 1:
        raise ConfigurationError(
            f"Found outputs {sorted(outputs)}. Expected one score a sample, by which items are ranked. Publish one "
            "alone, with --outputs NAME, or serve without --recommend and --items."
        )
    return scores.reshape(len(scores))


def _alike(found: np.ndarray, expected: np.ndarray) -> bool:
    size = float(np.abs(expected).max(initial=0))
    return bool(np.allclose(found, expected, rtol=0, atol=_CLOSE * size))


def _rise_together(products: np.ndarray, scores: np.ndarray) -> bool:
    """Whether the order by the one is that by the other, of the items of each user; `[moves, users]`."""
    order = np.argsort(products, axis=0, kind="stable")
    ordered = np.take_along_axis(scores, order, axis=0)
    allowed = _CLOSE * (float(scores.max()) - float(scores.min()))
    return bool((np.diff(ordered, axis=0) >= -allowed).all())
