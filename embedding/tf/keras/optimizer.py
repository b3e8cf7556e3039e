"""`KerasOptimizer`: the base class of TensorFlow 2.9's `tf.keras.optimizers.experimental`, over JAX arrays.

It owns the order of one step (sum over processes, rate, missing gradients, build, clip, update, count, average,
overwrite) and its configuration. What it remembers is in `optimizer_variables`. The update formulas are in
`sgd_ftrl`, `adagrad`, `adam` and `adamax_nadam`, or in a class of yours; the pure form for optax is made in
`functional`. These optimizers are for dense parameters; tables on hosts have their own in `embedding.optimizers`.

Differences from 2.9, all on purpose. Variables are known from the first step even if they had no gradient in it. Every
average belongs to its own variable. Rows that occur twice in a `RowSlices` are summed before the update.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from podembed.embedding.tf.keras import functional as keras_functional
from podembed.embedding.tf.keras import schedules
from podembed.embedding.tf.keras.array_operators import cast_to, described, plain
from podembed.embedding.tf.keras.gradients import Gradient, GradsAndVars, checked_pair, checked_pairs, clipped, present
from podembed.embedding.tf.keras.optimizer_variables import OptimizerVariables
from podembed.embedding.tf.keras.reducer import GradientReducer, default_gradient_reducer
from podembed.embedding.tf.keras.row_slices import RowSlices
from podembed.embedding.tf.keras.schedules import LearningRateSchedule
from podembed.embedding.tf.keras.tape import GradientTape, gradients_of
from podembed.embedding.tf.keras.variable import Variable, variables_of

_LEGACY_ARGUMENTS = frozenset({"lr", "decay", "gradient_transformers", "gradient_aggregator"})
_logger = logging.getLogger(__name__)


class KerasOptimizer(OptimizerVariables):
    """Keeps what an optimizer remembers and applies gradients to variables, in place.

    What changes it, or variables, raises RuntimeError inside a function that JAX traces; `as_optax` is the form for
    there.

    A subclass calls `super().build(var_list)` first, returns if `self._built`, makes its variables and sets
    `self._built = True`. It overrides `update_step`, where `self._index_dict[self._var_key(variable)]` is a variable's
    position in its lists, and `get_config`.

    Attributes (plain, may be changed between steps): the constructor's arguments, and `gradient_reducer`, which sums
    gradients over processes; None chooses by `jax.process_count()`.

    Args:
      name: prefix of the names of the variables made during `apply_gradients`.
      clipnorm: limit of each gradient's own norm.
      clipvalue: limit of each element. Only one of the three limits acts: clipnorm, else global_clipnorm, else
        clipvalue; 0 and negative numbers count as absent.
      global_clipnorm: limit of the norm of all gradients together.
      use_ema: keep an exponential moving average of every variable, over the steps in which it had a gradient.
      ema_momentum: weight of the old average, 0 to 1.
      ema_overwrite_frequency: every so many steps variables take the value of their average; None or 0 for never.
      jit_compile: compile the updates of a step into one program. Becomes False where there is no GPU; the attribute
        can be set to True afterwards all the same.
      weight_decay: before the update, each variable that has a gradient loses this part of itself times the rate:
        `w -= w * weight_decay * lr`, as in Keras 3. None and 0 for no decay.
    """

    def __init__(
        self,
        name: str,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        jit_compile: bool = True,
        weight_decay: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Checks the arguments.

        Raises:
          ValueError: both norms are limited, or with `use_ema` the momentum or frequency is out of range.
          TypeError: an argument that does not exist. `lr`, `decay`, `gradient_transformers`, `gradient_aggregator` only
            warn.
        """
        super().__init__(name)
        self.clipnorm = clipnorm
        self.global_clipnorm = global_clipnorm
        self.clipvalue = clipvalue
        self.use_ema = use_ema
        self.ema_momentum = ema_momentum
        self.ema_overwrite_frequency = ema_overwrite_frequency
        self.jit_compile = bool(jit_compile) and jax.default_backend() == "gpu"
        self.weight_decay = weight_decay
        self._excluded_variables: list[Variable] = []
        self._excluded_names: list[re.Pattern[str]] = []
        self.gradient_reducer: GradientReducer | None = None
        # Variables that were named once as having no gradient.
        self._warned: set[str] = set()
        _check_averaging(use_ema, ema_momentum, ema_overwrite_frequency)
        if clipnorm is not None and global_clipnorm is not None:
            raise ValueError(
                f"Found clipnorm={clipnorm} and global_clipnorm={global_clipnorm}. Expected at most one of them. Drop "
                "the other."
            )
        _check_unknown_arguments(kwargs)
        self._compiled_update: Callable[..., Any] | None = None

    def build(self, var_list: Sequence[Variable]) -> None:
        """Learns the model's variables, and makes their averages as copies of their values; only once.

        A class that never sets `self._built` learns them anew at each call and keeps the averages it has.

        Raises:
          TypeError: no list of variables.
        """
        self._require_own_trace("build")
        if self._built:
            return
        if isinstance(var_list, Variable):
            # Not taken for a list of one, since the slots are made by subclasses, which iterate over `var_list`.
            raise TypeError(f"Found one Variable, '{var_list.name}'. Expected a list of them. Write build([variable]).")
        if isinstance(var_list, Iterator):
            raise TypeError(
                f"Found a {type(var_list).__name__}, which gives its variables once. Expected a list of them, since "
                "they are gone through more than once. Write build(list(...))."
            )
        var_list = variables_of(var_list, where="build")
        if self._before_build is None:
            self._before_build = keras_functional.attributes_of(self)
        self._index_dict = {self._var_key(one): index for index, one in enumerate(var_list)}
        self._model_variables |= {self._var_key(one): one for one in var_list}
        for one in var_list:
            if self.use_ema and self._var_key(one) not in self._averages:
                average = self.add_variable_from_reference(one, "average", initial_value=one.value)
                self._averages[self._var_key(one)] = average

    def update_step(self, gradient: Any, variable: Variable) -> None:
        """Updates one variable in place, from an array of its shape or a `RowSlices` without duplicates.

        Raises:
          NotImplementedError: in this class.
        """
        raise NotImplementedError(f"{type(self).__name__} must override update_step(gradient, variable).")

    # --- one step ---

    def minimize(self, loss: Any, var_list: Variable | Sequence[Variable], tape: GradientTape | None = None) -> None:
        """`compute_gradients`, then `apply_gradients`."""
        self._require_own_trace("minimize")
        self.apply_gradients(self.compute_gradients(loss, var_list, tape))

    def compute_gradients(
        self, loss: Any, var_list: Variable | Sequence[Variable], tape: GradientTape | None = None
    ) -> list[tuple[jax.Array | None, Variable]]:
        """Returns a (gradient, variable) pair for each variable; the gradient is None where the loss does not depend on
        it.

        Args:
          loss: a callable without arguments, or a result recorded by `tape`.
          var_list: what to differentiate for.
          tape: needed for a recorded result; with a callable it records the run.

        Raises:
          ValueError: a loss that is an array, without the tape that recorded it.
          TypeError: something in `var_list` is no variable.
        """
        var_list = variables_of(var_list, where="compute_gradients")
        if not callable(loss) and tape is None:
            raise ValueError(
                f"Found a computed loss ({loss}) and no tape. Expected the tape that recorded it, or a callable. "
                "Pass `tape=`, or the loss as a function without arguments."
            )
        if tape is None:
            return list(zip(gradients_of(loss, var_list), var_list, strict=True))
        if callable(loss):
            tape.watch(var_list)
            loss = tape.record(loss)
        return list(zip(tape.gradient(loss, var_list), var_list, strict=True))

    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> GradsAndVars:
        """Returns the pairs with every gradient summed over the processes; None stays in its place. Override it for
        another sum.
        """
        pairs = [checked_pair(pair) for pair in grads_and_vars]
        reducer = self.gradient_reducer or default_gradient_reducer()
        sums = iter(reducer.sum([gradient for gradient, _ in pairs if gradient is not None]))
        return [(None if gradient is None else next(sums), variable) for gradient, variable in pairs]

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Variable]], skip_gradients_aggregation: bool = False
    ) -> None:
        """Updates variables, slots, averages and `iterations` in place.

        Args:
          grads_and_vars: pairs of a gradient (array, numbers, `RowSlices`) and a `Variable`. None leaves its variable,
            the variable's slots and its average alone, and warns the first time.
          skip_gradients_aggregation: the gradients are already sums over the processes.

        Raises:
          TypeError: not pairs of a gradient and a `Variable`.
          ValueError: no pair, more than two values in one, no gradient in any, or a gradient of another shape than its
            variable.
          KeyError: a variable that was not among those of the first call.
          RuntimeError: called inside a function that JAX traces; nothing has changed then.
        """
        self._require_own_trace("apply_gradients")
        pairs: GradsAndVars = checked_pairs(grads_and_vars)
        if not skip_gradients_aggregation:
            pairs = self.aggregate_gradients(pairs)
        if isinstance(self._learning_rate, LearningRateSchedule):
            self._current_learning_rate.assign(self._learning_rate(self.iterations))
        given = present(pairs, self._warned)
        with self._named_scope():
            self.build([variable for _, variable in pairs])
        gradients = self._clip_gradients([gradient for gradient, _ in given])
        merged = [one.merged() if isinstance(one, RowSlices) else one for one in gradients]
        self._update_all(merged, [variable for _, variable in given])
        self.iterations.assign_add(1)
        if self.use_ema:
            moved = [variable for _, variable in given]
            self._update_averages(moved)
            self._overwrite_when_due(moved)

    def finalize_variable_values(self, var_list: Variable | Sequence[Variable]) -> None:
        """With `use_ema` gives the model's variables the values of their averages; else does nothing.

        Raises:
          ValueError: not as many variables as the optimizer knows.
          KeyError: a variable it does not know.
          TypeError: something that is no variable.
        """
        self._require_own_trace("finalize_variable_values")
        if not self.use_ema:
            return
        var_list = variables_of(var_list, where="finalize_variable_values")
        if len(var_list) != len(self._averages):
            raise ValueError(
                f"Found {len(var_list)} variables to finalize. Expected the {len(self._averages)} the optimizer was "
                "built on. Pass all of them, after the first apply_gradients."
            )
        for variable in var_list:
            self._require_known(variable)
            variable.assign(self._averages[self._var_key(variable)].value)

    def _clip_gradients(self, gradients: list[Gradient]) -> list[Gradient]:
        return clipped(
            gradients, clipnorm=self.clipnorm, global_clipnorm=self.global_clipnorm, clipvalue=self.clipvalue
        )

    def _update_all(self, gradients: list[Gradient], variables: list[Variable]) -> None:
        for variable in variables:
            self._require_known(variable)
        if self.jit_compile:
            keras_functional.update_compiled(self, gradients, variables)
            return
        for gradient, variable in zip(gradients, variables, strict=True):
            self._decay(variable)
            self.update_step(gradient, variable)

    def exclude_from_weight_decay(
        self,
        var_list: Variable | Iterable[Variable] | None = None,
        var_names: str | re.Pattern[str] | Iterable[str | re.Pattern[str]] | None = None,
    ) -> None:
        """Leaves variables out of the decay. Replaces what an earlier call left out.

        Args:
          var_list: these variables, or this one.
          var_names: those in whose name one of these regular expressions is found, or this one.

        Raises:
          RuntimeError: the optimizer has been built.
          TypeError: something in `var_list` is no variable, or something in `var_names` no text.
          ValueError: a text that is no regular expression, or an empty one, which is found in every name.
        """
        self._require_own_trace("exclude_from_weight_decay")
        if self._built:
            raise RuntimeError(
                "Found an optimizer that is built. Expected exclusions before the first apply_gradients. "
                "Call exclude_from_weight_decay right after construction."
            )
        remedy = "Names are given as var_names=['bias']."
        # Not by its truth: that of a variable is the truth of its value.
        excluded = [] if var_list is None else variables_of(var_list, where="exclude_from_weight_decay", remedy=remedy)
        self._excluded_names = _patterns(var_names)
        self._excluded_variables = excluded

    def _decay(self, variable: Variable) -> None:
        if self.weight_decay and self._is_decayed(variable):
            rate = cast_to(self.learning_rate.value, variable.dtype)
            variable.assign_sub(variable.value * rate * self.weight_decay)

    def _is_decayed(self, variable: Variable) -> bool:
        if any(variable is one for one in self._excluded_variables):
            return False
        return not any(pattern.search(variable.name) for pattern in self._excluded_names)

    def _require_known(self, variable: Variable) -> None:
        if self._var_key(variable) not in self._index_dict:
            raise KeyError(
                f"Found variable '{variable.name}', which optimizer '{self._name}' does not know. Expected one of the "
                "variables of its first apply_gradients. Give all variables from the first step on, or make a new "
                "optimizer for another model."
            )

    def _update_averages(self, variables: Iterable[Variable]) -> None:
        for variable in variables:
            average = self._averages[self._var_key(variable)]
            average.assign(_weighted(average.value, self.ema_momentum, variable.value, 1 - self.ema_momentum))

    def _overwrite_when_due(self, variables: Iterable[Variable]) -> None:
        if not self.ema_overwrite_frequency:
            return
        is_due = plain(self.iterations) % self.ema_overwrite_frequency == 0
        is_traced = isinstance(is_due, Tracer)
        if not is_traced and not is_due:
            return
        for variable in variables:
            average = self._averages[self._var_key(variable)]
            variable.assign(jnp.where(is_due, average.value, variable.value) if is_traced else average.value)

    # --- configuration and the pure form ---

    def _serialize_hyperparameter(self, value: Any) -> Any:
        if isinstance(value, LearningRateSchedule):
            return schedules.serialize(value)
        if isinstance(value, Variable):
            return value.numpy().item()
        return described(value() if callable(value) else value)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments, without the name as in 2.9. Subclasses add the rate and their own. A
        decay is in it if there is one, since 2.9 knows none.

        Raises:
          TypeError: in subclasses, where the rate is a function.
        """
        decay = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        made = {
            "clipnorm": self.clipnorm,
            "global_clipnorm": self.global_clipnorm,
            "clipvalue": self.clipvalue,
            "use_ema": self.use_ema,
            "ema_momentum": self.ema_momentum,
            "ema_overwrite_frequency": self.ema_overwrite_frequency,
            "jit_compile": self.jit_compile,
            **decay,
        }
        return described(made)

    def _with_own(self, config: dict[str, Any], *names: str) -> dict[str, Any]:
        """`config` with the rate and the arguments `names` of a subclass."""
        own = {name: getattr(self, name) for name in names}
        return config | {"learning_rate": self._serialize_hyperparameter(self._learning_rate)} | described(own)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, type[LearningRateSchedule]] | None = None
    ) -> Self:
        """Returns a new optimizer with these arguments and no state; a schedule may be given in its serialized form."""
        arguments = dict(config)
        if isinstance(arguments.get("learning_rate"), Mapping):
            arguments["learning_rate"] = schedules.deserialize(arguments["learning_rate"], custom_objects)
        return cls(**arguments)

    def as_optax(self) -> optax.GradientTransformation:
        """Returns the same optimizer as a pure transformation, see `keras_functional.as_optax`.

        Raises:
          ValueError: variables were excluded from the decay as objects; parameters of optax have only names.
        """
        if self._excluded_variables:
            raise ValueError(
                f"Found variables {[one.name for one in self._excluded_variables]} excluded from the decay as objects. "
                "Expected names, "
                "for optax knows parameters by their paths. Use exclude_from_weight_decay(var_names=[...])."
            )
        return keras_functional.as_optax(self)


def _patterns(given: Any) -> list[re.Pattern[str]]:
    """As `exclude_from_weight_decay` takes them; a text that stands alone is one of them, and not its letters."""
    is_alone = isinstance(given, str | bytes | re.Pattern) or not isinstance(given, Iterable)
    several: Any = () if given is None else (given,) if is_alone else given
    found = []
    for one in several:
        if not isinstance(one, str | re.Pattern):
            raise TypeError(
                f"Found {one!r:.80} in var_names. Expected regular expressions for names of variables, such as 'bias'. "
                "Variables themselves are given as var_list=[variable]."
            )
        if one == "":
            raise ValueError(
                "Found an empty text in var_names. Expected a part of a name, since every name has an empty one in it. "
                "Leave it out, or set weight_decay=None to decay nothing."
            )
        try:
            found.append(re.compile(one))
        except re.error as error:
            raise ValueError(
                f"Found {one!r} in var_names, which is no regular expression: {error}. Expected one. Write "
                f"re.escape({one!r}) for these very letters."
            ) from error
    return found


def _check_averaging(use_ema: bool, momentum: float, frequency: int | None) -> None:
    if not use_ema:
        return
    if not 0 <= momentum <= 1:
        raise ValueError(f"Found ema_momentum={momentum}. Expected a number from 0 to 1. Use 0.99 for a slow average.")
    if frequency and (not isinstance(frequency, int | np.integer) or frequency < 1):
        raise ValueError(
            f"Found ema_overwrite_frequency={frequency}. Expected an integer of at least 1. Use None to never "
            "overwrite."
        )


def _check_unknown_arguments(arguments: Mapping[str, Any]) -> None:
    for name in arguments:
        if name not in _LEGACY_ARGUMENTS:
            raise TypeError(
                f"Found argument '{name}'. Expected only the arguments of the signature. Remove it or check its "
                "spelling."
            )
        _logger.warning("The argument %s of older Keras optimizers has no effect here.", name)


def _weighted(first: jax.Array, first_weight: float, second: jax.Array, second_weight: float) -> jax.Array:
    return first_weight * first + second_weight * second
