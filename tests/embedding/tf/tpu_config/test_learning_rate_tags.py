"""Tags of learning rates: how they are numbered, and what a step must bring."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import FTRL, SGD, Adagrad, learning_rate_at
from podembed.embedding.tf.tpu_config.learning_rate_tags import (
    TaggedLearningRate,
    check_learning_rates,
    learning_rate_tags,
    number_of_tags,
)
from podembed.embedding.tf.tpu_config.schema import TPUEmbeddingConfiguration


def table(rate=None, name=None):
    return TableConfig(4, 2, optimizer=None if rate is None else SGD(rate), name=name)


def config(*tags):
    """A message with one table for each tag; None is a constant rate."""
    message = TPUEmbeddingConfiguration()
    for position, tag in enumerate(tags):
        rate = message.table_descriptor.add(name=f"t{position}").optimization_parameters.learning_rate
        if tag is None:
            rate.constant = 0.5
        else:
            rate.dynamic.tag = tag
    return message


def test_tags_follow_first_use_over_the_tables():
    first, second = (lambda: 0.1), (lambda: 0.1)
    found = learning_rate_tags([table(0.5), table(second), table(first), table(second), table(0.0)])
    assert found.tags == (None, 0, 1, 0, None)
    assert found.callables == (second, first)


def test_a_global_callable_is_one_tag_for_all_tables_without_an_optimizer():
    rate = optax.constant_schedule(0.1)
    own = lambda: 0.2  # noqa: E731
    found = learning_rate_tags([table(), table(own), table()], optimizer=Adagrad(rate))
    assert found == ((0, 1, 0), (rate, own))


def test_the_same_callable_in_different_optimizers_is_one_tag():
    rate = optax.constant_schedule(0.1)
    tables = [TableConfig(4, 2, optimizer=SGD(rate)), TableConfig(4, 2, optimizer=FTRL(rate))]
    assert learning_rate_tags(tables) == ((0, 0), (rate,))


def test_equal_callables_are_one_tag():
    class Schedule:
        def rate(self):
            return 0.1

    schedule = Schedule()
    assert schedule.rate is not schedule.rate
    assert learning_rate_tags([table(schedule.rate), table(schedule.rate)]).tags == (0, 0)
    assert learning_rate_tags([table(schedule.rate), table(Schedule().rate)]).tags == (0, 1)


def test_no_tables_and_no_optimizer():
    assert learning_rate_tags([]) == ((), ())
    assert learning_rate_tags([table()]) == ((None,), ())


def test_another_optimizer_class_is_refused():
    wrong = TableConfig(4, 2, optimizer="adagrad", name="user")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Table 'user': 'adagrad' is an unsupported optimizer class"):
        learning_rate_tags([wrong])


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=12))
def test_numbering_is_dense_and_by_first_use(uses):
    rates = [lambda: 0.1 for _ in range(6)]
    found = learning_rate_tags([table(0.3 if use is None else rates[use]) for use in uses])
    in_order = list(dict.fromkeys(use for use in uses if use is not None))
    assert found.callables == tuple(rates[use] for use in in_order)
    assert found.tags == tuple(None if use is None else in_order.index(use) for use in uses)


# ---- the rates of a step ----


def test_rates_by_position():
    message = config(1, None, 0, 1)
    rates = check_learning_rates(message, [np.float32(0.25), jnp.float32(0.1)])
    assert rates == (np.float32(0.25), np.float32(0.1))
    assert all(type(rate) is np.float32 for rate in rates)
    assert number_of_tags(message) == 2


@pytest.mark.parametrize("rates", [[], (), np.empty(0, np.float32)])
def test_no_rates_if_all_are_constant(rates):
    assert check_learning_rates(config(None, None), rates) == ()


@pytest.mark.parametrize("rate", [0.5, 1, 0.0, -1.5, np.float32(2), np.array(2, np.float32), jnp.asarray(2.0)])
def test_scalars_that_are_float32_or_python_numbers(rate):
    (found,) = check_learning_rates(config(0), [rate])
    assert found == np.float32(rate)


def test_a_vector_of_rates():
    assert check_learning_rates(config(0, 1), np.array([1, 2], np.float32)) == (1, 2)


@pytest.mark.parametrize(
    "rate",
    [
        np.float64(0.5),
        np.array([0.5], np.float32),
        np.array(1, np.int32),
        jnp.ones(2),
        jnp.bfloat16(1),
        "0.5",
        None,
        True,
        np.bool_(True),
        lambda: 0.5,
    ],
)
def test_a_rate_that_is_no_float32_scalar_is_named_by_its_tag(rate):
    with pytest.raises(
        ValueError, match=r"learning rate of tag 1\. Expected a float32 scalar\. Pass np\.float32\(rate\)"
    ):
        check_learning_rates(config(0, 1), [0.1, rate])


def test_a_missing_rate_is_named_with_its_tables():
    with pytest.raises(ValueError, match=r"none for tag 1 of 't0' and 't2'. Expected 2, one per tag"):
        check_learning_rates(config(1, 0, 1), [0.1])


@pytest.mark.parametrize(("tags", "remedy"), [((None,), "Pass none"), ((0, 0), "Pass only the first 1")])
def test_a_rate_too_many(tags, remedy):
    with pytest.raises(ValueError, match=remedy):
        check_learning_rates(config(*tags), [0.1, 0.2])


@pytest.mark.parametrize(("tags", "left_out"), [((1,), 0), ((0, 2), 1), ((3, 0, 1), 2)])
def test_a_tag_that_is_left_out(tags, left_out):
    with pytest.raises(ValueError, match=f"without tag {left_out}. Expected every tag from 0"):
        check_learning_rates(config(*tags), [0.1] * len(tags))


def test_a_negative_tag():
    with pytest.raises(ValueError, match="Found tag -1 in table 't1'"):
        check_learning_rates(config(0, -1), [0.1, 0.2])


def test_step_counters_are_numbered_with_the_rates():
    message = config(0)
    message.table_descriptor[0].optimization_parameters.frequency_aware_adagrad.step_counter.tag = 1
    with pytest.raises(ValueError, match="Found 2 tags for 1 tables, tag 1 being one too many"):
        number_of_tags(message)
    message.table_descriptor.add(name="t1").optimization_parameters.learning_rate.constant = 1.0
    assert number_of_tags(message) == 2
    with pytest.raises(ValueError, match="none for tag 1 of a step counter"):
        check_learning_rates(message, [0.1])


@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=1, max_size=6))
def test_the_tags_of_a_message_are_complete_or_refused(tags):
    used = {tag for tag in tags if tag is not None}
    if used == set(range(len(used))):
        assert number_of_tags(config(*tags)) == len(used)
    else:
        with pytest.raises(ValueError, match="without tag"):
            number_of_tags(config(*tags))


def test_a_tagged_rate_gives_what_was_set_last():
    rate = TaggedLearningRate(3)
    with pytest.raises(ValueError, match="Found no rate for tag 3"):
        rate()
    rate.set(np.float32(0.5))
    assert rate() == 0.5
    assert learning_rate_at(rate, 7) == 0.5
    rate.set(0.25)
    assert rate() == 0.25
    assert repr(rate) == "TaggedLearningRate(tag=3, rate=0.25)"


def test_tagged_rates_are_told_apart_by_identity():
    rates = [TaggedLearningRate(0), TaggedLearningRate(0)]
    assert SGD(rates[0]) != SGD(rates[1])
    assert learning_rate_tags([table(rates[0]), table(rates[1]), table(rates[0])]).tags == (0, 1, 0)
