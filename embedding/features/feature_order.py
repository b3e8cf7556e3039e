"""`FeatureOrder`: the order in which a model reads its features, which must be the one in which it was trained.

In a run a model always gets `Activations`, which keep the order of the features. By hand it may get a plain dict, whose
order JAX changes to that of the sorted names wherever it takes the dict apart. A model therefore never follows a dict's
order, but the one that its job gave it. This module does not load JAX, since hosts read jobs, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class FeatureOrder:
    """Orders of features that jobs gave a model. Mutable: `tell` adds to them.

    A model keeps it as its attribute `order`, which every job tells the order of its features; `Model.init` tells that
    of the widths. A model may be initialised for several sets of features; each set has its own order.
    """

    _told: set[tuple[str, ...]] = field(default_factory=set)

    def tell(self, features: Iterable[str]) -> None:
        """Remembers the order of a set of features."""
        self._told.add(tuple(features))

    def read(self, activations: Mapping[str, Any]) -> list[Any]:
        """The activations of all features, in the order in which the model was trained.

        That is the one that a job gave for these features, however they lie in `activations`. Told none or several, it
        follows `Activations`.

        Raises:
          ValueError: a plain mapping of several features, for which the model has no order or more than one.
        """
        from podembed.embedding.features.activations import Activations

        orders = [order for order in self._told if set(order) == set(activations)]
        if len(orders) == 1:
            return [activations[feature] for feature in orders[0]]
        if isinstance(activations, Activations) or len(activations) < 2:
            return list(activations.values())
        known = " and ".join(str(list(order)) for order in sorted(orders or self._told)) or "no order"
        raise ValueError(
            f"Found activations of {sorted(activations)} in a {type(activations).__name__}, and a model that knows "
            f"{known}. Expected one order of these features, since JAX sorts the names of a dict. Pass "
            "podembed.embedding.Activations in the order of the job's features, take the model from its job, or call "
            "model.init before."
        )
