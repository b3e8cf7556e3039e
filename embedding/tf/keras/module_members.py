"""The members of `tf.Module` for embeddings and optimizers, with the meaning that they have where JAX takes
TensorFlow's place.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax

from podembed.embedding.tf.keras.variable import Variable

# A capital that begins a word: behind a small letter, or before one.
_WORD = re.compile(r"((?<=[a-z0-9])[A-Z]|(?!^)[A-Z](?=[a-z]))")
Method = TypeVar("Method", bound=Callable[..., Any])


class ModuleMembers:
    """What programs that walk over modules ask of one: its name, its variables, the modules inside."""

    @property
    def name(self) -> str:
        """The name of the class in TensorFlow's way of writing it."""
        return _WORD.sub(r"_\1", type(self).__name__).lower()

    @property
    def name_scope(self) -> AbstractContextManager[Any]:
        """A block whose operations carry the name in what JAX compiles and profiles; a new one at each access."""
        return jax.named_scope(self.name)

    @property
    def submodules(self) -> tuple[Any, ...]:
        """The modules inside, of which embeddings and optimizers have none."""
        return ()

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables of this process: the tables outside any strategy, none under one, whose hosts hold the rows."""
        return self._held_variables()

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """Those that an optimizer may change. Under a strategy there are none: `apply_gradients` trains the rows."""
        return tuple(variable for variable in self.variables if variable.trainable)

    @property
    def non_trainable_variables(self) -> tuple[Variable, ...]:
        """The others; slots are no variables, see `read_tables`."""
        return tuple(variable for variable in self.variables if not variable.trainable)

    @classmethod
    def with_name_scope(cls, method: Method) -> Method:
        """A method that runs inside the name scope of its object, for subclasses."""

        @functools.wraps(method)
        def scoped(self: ModuleMembers, *arguments: Any, **keywords: Any) -> Any:
            with self.name_scope:
                return method(self, *arguments, **keywords)

        return scoped  # type: ignore[return-value]

    def _held_variables(self) -> tuple[Variable, ...]:
        raise NotImplementedError
