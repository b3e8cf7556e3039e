"""From a message to declarations: every field is read, or refused by its name."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.embedding.config import QuantizationConfig
from podembed.embedding.optimizers import FTRL, SGD, Adagrad, AdagradMomentum, Adam, learning_rate_at
from podembed.embedding.tf.tpu_config.checks import UnsupportedConfigField
from podembed.embedding.tf.tpu_config.learning_rate_tags import TaggedLearningRate, check_learning_rates
from podembed.embedding.tf.tpu_config.read import from_config
from podembed.embedding.tf.tpu_config.schema import TPUEmbeddingConfiguration, parse_config, serialize_config

UNSUPPORTED_OPTIMIZERS = (
    "momentum",
    "rms_prop",
    "centered_rms_prop",
    "mdl_adagrad_light",
    "adadelta",
    "proximal_adagrad",
    "bounded_adagrad",
    "online_yogi",
    "proximal_yogi",
    "frequency_estimator",
    "user_defined_program",
    "assign",
    "lion",
    "frequency_aware_adagrad",
)


def config(num_tables=1, *, chosen="adagrad"):
    """A small configuration of 2.21 that is supported: tables t0, t1, ... with one feature each."""
    message = TPUEmbeddingConfiguration(mode=2, num_hosts=1, num_tensor_cores=1)
    for number in range(num_tables):
        table = message.table_descriptor.add(name=f"t{number}", vocabulary_size=10, dimension=4)
        table.optimization_parameters.learning_rate.constant = 0.5
        getattr(table.optimization_parameters, chosen).SetInParent()
        message.feature_descriptor.add(table_id=number, input_shape=[8])
    return message


def counted(num_tables=1):
    """The same of 2.3."""
    message = config(num_tables)
    message.ClearField("feature_descriptor")
    message.batch_size_per_tensor_core = 8
    for table in message.table_descriptor:
        table.num_features = 3
    return message


def parameters(message):
    return message.table_descriptor[0].optimization_parameters


def optimizer_of(message) -> Any:
    return from_config(message).tables[0].optimizer


def refused(message, *, field, table: str | None = "t0"):
    with pytest.raises(UnsupportedConfigField) as raised:
        from_config(message)
    assert (raised.value.table, raised.value.field) == (table, field)
    assert f"field '{field}'" in str(raised.value)
    return str(raised.value)


def test_tables_and_features():
    message = config(2)
    message.feature_descriptor[1].name = "f"
    message.feature_descriptor.add(table_id=0, input_shape=[8, 5])
    read = from_config(message)
    tables, features, by_tag = read
    assert [(table.name, table.vocabulary_size, table.dim, table.combiner) for table in tables] == [
        ("t0", 10, 4, "mean"),
        ("t1", 10, 4, "mean"),
    ]
    assert [feature.table for feature in features] == [tables[0], tables[1], tables[0]]
    assert [feature.output_shape for feature in features] == [(8,), (8,), (8, 5)]
    assert [feature.name for feature in features] == [None, "f", None]
    assert by_tag == {}
    assert read.tables is tables


def test_features_that_are_only_counted_are_one_a_table():
    tables, features, _ = from_config(counted(2))
    assert [(feature.table, feature.output_shape) for feature in features] == [(tables[0], (24,)), (tables[1], (24,))]


def test_combiners_come_from_the_caller():
    assert [table.combiner for table in from_config(config(2), combiners=["sum", "sqrtn"]).tables] == ["sum", "sqrtn"]
    with pytest.raises(ValueError, match="Found 1 combiners for 2 tables"):
        from_config(config(2), combiners=["sum"])
    with pytest.raises(ValueError, match="Found combiner='max'"):
        from_config(config(), combiners=["max"])


# ---- learning rates ----


def test_a_constant_rate_is_a_float():
    message = config()
    parameters(message).learning_rate.constant = 0.1
    assert optimizer_of(message) == Adagrad(0.1)
    parameters(message).learning_rate.constant = 0.0
    assert optimizer_of(message) == Adagrad(0.0)


def tagged():
    message = config(4)
    for table, tag in zip(message.table_descriptor, (1, None, 0, 1), strict=True):
        if tag is not None:
            table.optimization_parameters.learning_rate.dynamic.tag = tag
    return message


def test_tags_become_objects_that_read_the_rate_of_the_step():
    message = tagged()
    read: Any = from_config(message)
    tables, by_tag = read.tables, read.tables_by_tag
    assert by_tag == {0: [tables[2]], 1: [tables[0], tables[3]]}
    rates = {tag: members[0].optimizer.learning_rate for tag, members in by_tag.items()}
    assert tables[3].optimizer.learning_rate is rates[1]
    assert all(isinstance(rate, TaggedLearningRate) and rate.tag == tag for tag, rate in rates.items())
    for tag, value in enumerate(check_learning_rates(message, [np.float32(0.25), 0.75])):
        rates[tag].set(value)
    assert [learning_rate_at(table.optimizer.learning_rate, 3) for table in tables] == [0.75, 0.5, 0.25, 0.75]


def test_own_callables_for_the_tags():
    first, second = (lambda: 0.1), (lambda: 0.2)
    tables: Any = from_config(tagged(), [first, second]).tables
    assert [table.optimizer.learning_rate for table in tables] == [second, 0.5, first, second]


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([], "Found 0 learning_rates for 2 tags"),
        ([abs] * 3, "Found 3"),
        ([abs, 0.5], "Found 0.5 for tag 1. Expected a callable"),
    ],
)
def test_wrong_callables(rates, message):
    with pytest.raises(ValueError, match=message):
        from_config(tagged(), rates)


def test_tags_must_be_complete():
    message = tagged()
    message.table_descriptor[2].optimization_parameters.learning_rate.dynamic.tag = 2
    with pytest.raises(ValueError, match="without tag 0"):
        from_config(message)


# ---- optimizers ----


def test_every_supported_optimizer():
    message = config(chosen="stochastic_gradient_descent")
    assert optimizer_of(message) == SGD(0.5)
    rule = parameters(message).adagrad_momentum
    rule.momentum, rule.use_nesterov, rule.exponent, rule.beta2, rule.epsilon = 0.9, True, 3, 0.1, 1e-6
    assert optimizer_of(message) == AdagradMomentum(0.5, 0.9, True, 3, 0.1, 1e-6)
    rule = parameters(message).ftrl
    rule.l1, rule.l2, rule.lr_power, rule.beta = 0.1, 0.2, -0.3, 0.4
    rule.multiply_linear_by_lr = rule.allow_zero_accumulator = True
    options: Any = {"multiply_linear_by_learning_rate": True, "allow_zero_accumulator": True}
    assert optimizer_of(message) == FTRL(0.5, -0.3, 0.1, 0.2, 0.4, **options)
    rule = parameters(message).adam
    rule.beta1, rule.beta2, rule.epsilon = 0.9, 0.999, 1e-7
    assert optimizer_of(message) == Adam(0.5, sum_inside_sqrt=False)
    rule.use_non_lazy_adam = rule.use_sum_inside_sqrt = True
    assert optimizer_of(message) == Adam(0.5, lazy_adam=False)


def test_options_that_all_optimizers_have():
    message = config()
    found = parameters(message)
    found.clipping_limits.lower.value = 0.0
    found.gradient_clipping_limits.upper.value = 0.1
    found.weight_decay_factor = 0.01
    found.multiply_weight_decay_factor_by_learning_rate = True
    found.low_dimensional_packing_status = 1
    assert optimizer_of(message) == Adagrad(
        0.5,
        clip_weight_min=0.0,
        clipvalue=(None, 0.1),
        weight_decay_factor=0.01,
        multiply_weight_decay_factor_by_learning_rate=True,
        low_dimensional_packing_status=True,
    )


@pytest.mark.parametrize(("status", "accumulates"), [(0, True), (1, True), (2, False)])
def test_unspecified_accumulation_is_enabled(status, accumulates):
    message = config()
    parameters(message).gradient_accumulation_status = status
    assert optimizer_of(message).use_gradient_accumulation is accumulates


@pytest.mark.parametrize(("status", "packs"), [(0, False), (1, True), (2, False)])
def test_packing(status, packs):
    message = config()
    parameters(message).low_dimensional_packing_status = status
    assert optimizer_of(message).low_dimensional_packing_status is packs


@pytest.mark.parametrize("status", [0, 2])
def test_hot_ids_that_are_not_replicated(status):
    message = config()
    parameters(message).hot_id_replication_configuration.status = status
    assert optimizer_of(message) == Adagrad(0.5)


def test_a_table_without_optimizer():
    message = config(2)
    message.table_descriptor[0].ClearField("optimization_parameters")
    assert [table.optimizer for table in from_config(message).tables] == [None, Adagrad(0.5)]


@given(st.floats(0.0, width=32, allow_nan=False, allow_infinity=False))
def test_numbers_come_back_as_the_shortest_decimal_of_their_float32(value):
    message = config()
    parameters(message).learning_rate.constant = value
    rate = optimizer_of(message).learning_rate
    assert np.float32(rate) == np.float32(value)
    assert repr(rate) == repr(float(str(np.float32(value))))


@pytest.mark.parametrize("chosen", UNSUPPORTED_OPTIMIZERS)
def test_optimizers_that_do_not_exist_here(chosen):
    text = refused(config(chosen=chosen), field=f"optimization_parameters.{chosen}")
    assert f"Found optimizer {chosen}. Expected one of stochastic_gradient_descent, adagrad" in text


def test_supported_and_unsupported_optimizers_are_all_there_are():
    oneof = parameters(config()).DESCRIPTOR.oneofs_by_name["parameters"]
    supported = {"stochastic_gradient_descent", "adagrad", "adagrad_momentum", "ftrl", "adam"}
    assert {field.name for field in oneof.fields} == supported | set(UNSUPPORTED_OPTIMIZERS)


def set_field(message, path, value):
    *parents, last = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    setattr(message, last, value)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"hot_id_replication_configuration.status": 1}, "hot_id_replication_configuration.status"),
        ({"hot_id_replication_configuration.status": 3}, "hot_id_replication_configuration.status"),
        ({"hot_id_replication_configuration.status": 4}, "hot_id_replication_configuration.status"),
        ({"gradient_accumulation_status": 3}, "gradient_accumulation_status"),
        ({"low_dimensional_packing_status": -1}, "low_dimensional_packing_status"),
        ({"gradient_accumulation_status": 2, "gradient_clipping_limits.lower.value": 0.0}, "gradient_clipping_limits"),
        (
            {"gradient_clipping_limits.lower.value": 1, "gradient_clipping_limits.upper.value": 0},
            "gradient_clipping_limits",
        ),
        ({"clipping_limits.lower.value": 1, "clipping_limits.upper.value": 0}, "clipping_limits"),
        ({"clipping_limits.lower.value": np.nan}, "clipping_limits"),
        ({"gradient_clipping_limits.upper.value": np.nan}, "gradient_clipping_limits"),
        ({"adam.beta1": 1.0, "adam.epsilon": 1.0}, "adam.beta1"),
        ({"adam.beta2": -0.5, "adam.epsilon": 1.0}, "adam.beta2"),
        ({"adam.beta1": 0.5}, "adam.epsilon"),
        (
            {"adam.use_non_lazy_adam": True, "adam.epsilon": 1, "gradient_accumulation_status": 2},
            "adam.use_non_lazy_adam",
        ),
        ({"adagrad_momentum.exponent": 2}, "adagrad_momentum.epsilon"),
        ({"adagrad_momentum.epsilon": 1}, "adagrad_momentum.exponent"),
        ({"simulated_quantization.enabled": True}, "simulated_quantization.clipping_limits"),
    ],
)
def test_settings_of_an_optimizer_that_are_refused(settings, field):
    message = config()
    for path, value in settings.items():
        set_field(parameters(message), path, value)
    refused(message, field=f"optimization_parameters.{field}")


def test_missing_learning_rate_and_missing_optimizer():
    message = config()
    parameters(message).ClearField("learning_rate")
    refused(message, field="optimization_parameters.learning_rate")
    message = config()
    parameters(message).ClearField("adagrad")
    text = refused(message, field="optimization_parameters.parameters")
    assert "Found learning_rate but no optimizer" in text


# ---- quantization ----


def quantized(lower: float | None = -1.0, upper: float | None = 1.0, buckets=4, *, enabled=True):
    message = config()
    simulated = parameters(message).simulated_quantization
    simulated.enabled, simulated.num_buckets = enabled, buckets
    if lower is not None:
        simulated.clipping_limits.lower.value = lower
    if upper is not None:
        simulated.clipping_limits.upper.value = upper
    return message


def test_quantization():
    assert from_config(quantized(0.1, 0.7)).tables[0].quantization_config == QuantizationConfig(4, 0.1, 0.7)
    assert from_config(quantized(enabled=False)).tables[0].quantization_config is None
    assert from_config(quantized(None, None, 0, enabled=False)).tables[0].quantization_config is None


def test_quantization_of_a_table_without_optimizer():
    message = quantized()
    parameters(message).ClearField("adagrad")
    parameters(message).ClearField("learning_rate")
    table = from_config(message).tables[0]
    assert (table.optimizer, table.quantization_config) == (None, QuantizationConfig(4, -1.0, 1.0))


@pytest.mark.parametrize(
    ("lower", "upper"), [(None, 1.0), (0.0, None), (1.0, 1.0), (2.0, 1.0), (-np.inf, 1.0), (0.0, np.nan)]
)
def test_quantization_needs_a_range(lower, upper):
    refused(quantized(lower, upper), field="optimization_parameters.simulated_quantization.clipping_limits")


@pytest.mark.parametrize("buckets", [-1, 0, 1])
def test_quantization_needs_buckets(buckets):
    refused(quantized(buckets=buckets), field="optimization_parameters.simulated_quantization.num_buckets")


# ---- the engine ----


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize("strategy", [0, 1])
def test_modes_and_strategies_that_are_supported(mode, strategy):
    message = config()
    message.mode, message.sharding_strategy = mode, strategy
    assert len(from_config(message).tables) == 1


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("mode", 0),
        ("mode", 3),
        ("mode", 4),
        ("sharding_strategy", 2),
        ("profile_data_directory", "/tmp/profile"),
        ("spmd_sharding.use_manual_partitioning", True),
        ("spmd_sharding.use_shardy_partitioner", True),
    ],
)
def test_what_the_engine_does_not_do(path, value):
    message = config()
    set_field(message, path, value)
    refused(message, field=path, table=None)


def test_model_parallelism_over_several_cores():
    message = config()
    message.spmd_sharding.enabled = True
    for cores in (0, 1):
        message.spmd_sharding.num_cores_per_replica = cores
        assert len(from_config(message).tables) == 1
    message.spmd_sharding.num_cores_per_replica = 2
    text = refused(message, field="spmd_sharding.num_cores_per_replica", table=None)
    assert "Found 2. Expected it unset. Remove it: a replica is one device here." in text
    message.spmd_sharding.enabled = False
    assert len(from_config(message).tables) == 1


def test_no_table():
    refused(TPUEmbeddingConfiguration(mode=2), field="table_descriptor", table=None)


@pytest.mark.parametrize("field", ["vocabulary_size", "dimension"])
@pytest.mark.parametrize("size", [0, -5])
def test_sizes_of_a_table(field, size):
    message = config()
    setattr(message.table_descriptor[0], field, size)
    assert f"Found {size}. Expected at least 1" in refused(message, field=field)


def test_names_of_tables():
    message = config(2)
    message.table_descriptor[1].name = "t0"
    assert "Expected a name no other table has" in refused(message, field="name")
    message.table_descriptor[1].name = ""
    refused(message, field="name", table="")


# ---- features ----


@pytest.mark.parametrize("table_id", [-1, 1, 2**31 - 1])
def test_a_feature_of_no_table(table_id):
    message = config()
    message.feature_descriptor.add(table_id=table_id, input_shape=[8])
    refused(message, field="feature_descriptor[1].table_id", table=None)


@pytest.mark.parametrize("shape", [[], [0], [8, -1]])
def test_shapes_that_are_not_known(shape):
    message = config()
    message.feature_descriptor.add(input_shape=shape)
    refused(message, field="feature_descriptor[1].input_shape", table=None)


def test_a_table_of_no_feature():
    message = config(2)
    del message.feature_descriptor[1]
    refused(message, field="feature_descriptor", table="t1")


def test_counts_and_descriptors_that_agree():
    message = config()
    message.feature_descriptor.add(input_shape=[8, 2])
    message.batch_size_per_tensor_core, message.table_descriptor[0].num_features = 8, 3
    assert len(from_config(message).features) == 2


@pytest.mark.parametrize(("batch_size", "num_features"), [(8, 2), (0, 1), (8, 0), (4, 1)])
def test_counts_and_descriptors_that_conflict(batch_size, num_features):
    message = config()
    message.batch_size_per_tensor_core, message.table_descriptor[0].num_features = batch_size, num_features
    assert "with 8 activations" in refused(message, field="num_features")


@pytest.mark.parametrize("count", [0, -1])
def test_counts_without_descriptors(count):
    message = counted(2)
    message.table_descriptor[1].num_features = count
    refused(message, field="num_features", table="t1")
    message = counted()
    message.batch_size_per_tensor_core = count
    refused(message, field="batch_size_per_tensor_core", table=None)


# ---- fields that a newer schema has ----


def unknown(number):
    tag, out = number << 3, bytearray()
    while tag > 0x7F:
        out.append(tag & 0x7F | 0x80)
        tag >>= 7
    return bytes([*out, tag, 1])


@pytest.mark.parametrize(
    ("place", "field", "table"),
    [
        (lambda message: message, "99", None),
        (lambda message: message.table_descriptor[0], "99", "t0"),
        (lambda message: message.table_descriptor[0].optimization_parameters, "optimization_parameters.99", "t0"),
        (lambda message: parameters(message).adagrad, "optimization_parameters.adagrad.99", "t0"),
        (lambda message: parameters(message).learning_rate, "optimization_parameters.learning_rate.99", "t0"),
        (lambda message: message.feature_descriptor[0], "feature_descriptor[0].99", None),
        (lambda message: message.spmd_sharding, "spmd_sharding.99", None),
    ],
)
def test_unknown_fields_are_kept_in_bytes_and_refused_in_meaning(place, field, table):
    message = config()
    place(message).MergeFromString(unknown(99))
    again = parse_config(serialize_config(message))
    assert again == message
    assert "Found field number 99, which is unknown here" in refused(again, field=field, table=table)


def test_an_optimizer_that_only_a_newer_schema_has():
    message = config()
    parameters(message).ClearField("adagrad")
    parameters(message).MergeFromString(unknown(31))
    refused(message, field="optimization_parameters.31")
    parameters(message).ClearField("learning_rate")
    refused(message, field="optimization_parameters.31")
