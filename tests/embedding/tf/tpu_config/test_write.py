"""From declarations to a message: order, sizes, tags, shapes, both generations, and what has no place in it."""

# Wrong arguments are passed on purpose.
# pyright: reportArgumentType=false

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    CustomRowOptimizer,
    Lion,
    Momentum,
    RowWiseAdagrad,
)
from podembed.embedding.tf.tpu_config.checks import UnsupportedConfigField
from podembed.embedding.tf.tpu_config.schema import TPUEmbeddingConfiguration
from podembed.embedding.tf.tpu_config.write import to_config

Pair = namedtuple("Pair", "y x")


def table(name=None, optimizer=None, **options):
    return TableConfig(options.pop("rows", 10), 4, optimizer=optimizer or SGD(), name=name, **options)


def write(features, **options):
    return to_config(features, **({"num_hosts": 1, "num_tensor_cores": 2, "batch_size": 8} | options))


def parameters_of(optimizer, **options):
    message = write([FeatureConfig(table("t", optimizer))], **options)
    return message.table_descriptor[0].optimization_parameters


def test_the_engine():
    message = write([FeatureConfig(table())], num_hosts=3, num_tensor_cores=4, pipeline_execution_with_tensor_core=True)
    assert message.mode == TPUEmbeddingConfiguration.TRAINING
    assert message.sharding_strategy == TPUEmbeddingConfiguration.DIV_DEFAULT
    assert (message.num_hosts, message.num_tensor_cores) == (3, 4)
    assert message.pipeline_execution_with_tensor_core is True
    assert message.profile_data_directory == ""
    assert not message.HasField("spmd_sharding")


def test_flattening_sorts_keys_and_keeps_the_order_of_sequences():
    a, b, c, d = (table(name) for name in "abcd")
    features = {"z": FeatureConfig(a), "k": Pair(y=FeatureConfig(b), x=[FeatureConfig(c)]), "b": (FeatureConfig(d),)}
    message = write(OrderedDict(features))
    assert [found.name for found in message.table_descriptor] == ["d", "b", "c", "a"]
    assert [found.table_id for found in message.feature_descriptor] == [0, 1, 2, 3]


def test_paths_that_read_alike_are_two_features():
    shared = table("t")
    message = write({"a/b": FeatureConfig(shared, name="one"), "a": {"b": FeatureConfig(shared, name="two")}})
    assert [found.name for found in message.feature_descriptor] == ["two", "one"]


def test_one_feature_without_nesting():
    assert len(write(FeatureConfig(table())).feature_descriptor) == 1


@pytest.mark.parametrize(("features", "path"), [({"c": {"z": 3}}, "c/z"), ([None], "0"), ("text", "")])
def test_a_leaf_that_is_no_feature(features, path):
    with pytest.raises(ValueError, match=f"at path '{path}'. Expected a FeatureConfig"):
        write(features)


def test_tables_are_told_apart_by_identity_and_named_by_position():
    first, second = table(), table()
    message = write([FeatureConfig(first), FeatureConfig(second), FeatureConfig(first)])
    assert [found.name for found in message.table_descriptor] == ["table_0", "table_1"]
    assert [found.table_id for found in message.feature_descriptor] == [0, 1, 0]
    assert first.name is None


@pytest.mark.parametrize("names", [("t", "t"), ("table_1", None)])
def test_two_tables_of_one_name(names):
    with pytest.raises(ValueError, match=r"Multiple tables with name t\w* found\."):
        write([FeatureConfig(table(name)) for name in names])


def test_feature_names_are_written_where_given():
    shared = table()
    message = write([FeatureConfig(shared, name="f"), FeatureConfig(shared), FeatureConfig(shared, name="")])
    assert [found.name for found in message.feature_descriptor] == ["f", "", ""]


@pytest.mark.parametrize(("rows", "hosts", "announced"), [(13, 5, 13), (3, 5, 5), (5, 5, 5), (2**40, 4, 2**40)])
def test_announced_rows(rows, hosts, announced):
    message = write([FeatureConfig(table(rows=rows))], num_hosts=hosts)
    assert message.table_descriptor[0].vocabulary_size == announced
    assert message.table_descriptor[0].dimension == 4


def test_the_default_optimizer_fills_in_and_is_not_written_into_the_declaration():
    bare = TableConfig(10, 4, name="bare")
    message = write([FeatureConfig(bare), FeatureConfig(table("own", Adam()))], optimizer=Adagrad(0.5))
    chosen = [found.optimization_parameters.WhichOneof("parameters") for found in message.table_descriptor]
    assert chosen == ["adagrad", "adam"]
    assert bare.optimizer is None


def test_a_table_without_any_optimizer():
    quantized = TableConfig(10, 4, quantization_config=QuantizationConfig(4, 0.0, 1.0))
    message = write([FeatureConfig(TableConfig(10, 4)), FeatureConfig(quantized)])
    plain, with_quantization = message.table_descriptor
    assert not plain.HasField("optimization_parameters")
    assert [field.name for field, _ in with_quantization.optimization_parameters.ListFields()] == [
        "simulated_quantization"
    ]


def test_tags():
    shared, own = (lambda: 0.1), (lambda: 0.2)
    bare = TableConfig(10, 4)
    features = [FeatureConfig(table("a", SGD(0.5))), FeatureConfig(table("b", FTRL(own))), FeatureConfig(bare)]
    message = write([*features, FeatureConfig(table("c", Adam(shared)))], optimizer=Adagrad(shared))
    rates = [found.optimization_parameters.learning_rate for found in message.table_descriptor]
    assert [rate.WhichOneof("learning_rate") for rate in rates] == ["constant", "dynamic", "dynamic", "dynamic"]
    assert [rate.dynamic.tag for rate in rates[1:]] == [0, 1, 1]


def test_rate_zero_is_written():
    rate = parameters_of(SGD(0.0)).learning_rate
    assert rate.WhichOneof("learning_rate") == "constant"
    assert rate.constant == 0.0


# ---- what an optimizer becomes ----


@pytest.mark.parametrize(
    ("optimizer", "chosen", "fields"),
    [
        (SGD(), "stochastic_gradient_descent", {}),
        (Adagrad(initial_accumulator_value=3.0), "adagrad", {}),
        (
            AdagradMomentum(momentum=0.5, use_nesterov=True, exponent=4, beta2=0.25, epsilon=0.125),
            "adagrad_momentum",
            {"momentum": 0.5, "use_nesterov": True, "exponent": 4, "beta2": 0.25, "epsilon": 0.125},
        ),
        (
            FTRL(0.5, -0.25, 1.5, 2.5, 0.75, multiply_linear_by_learning_rate=True, allow_zero_accumulator=True),
            "ftrl",
            {
                "lr_power": -0.25,
                "l1": 1.5,
                "l2": 2.5,
                "beta": 0.75,
                "multiply_linear_by_lr": True,
                "allow_zero_accumulator": True,
            },
        ),
        (
            Adam(beta_1=0.5, beta_2=0.25, epsilon=0.125),
            "adam",
            {"beta1": 0.5, "beta2": 0.25, "epsilon": 0.125, "use_sum_inside_sqrt": True},
        ),
        (
            Adam(lazy_adam=False, sum_inside_sqrt=False, beta_1=0.0, beta_2=0.0, epsilon=2),
            "adam",
            {"epsilon": 2, "use_non_lazy_adam": True},
        ),
    ],
)
def test_fields_of_each_optimizer(optimizer, chosen, fields):
    parameters = parameters_of(optimizer)
    assert parameters.WhichOneof("parameters") == chosen
    rule = getattr(parameters, chosen)
    assert {field.name: value for field, value in rule.ListFields()} == fields


@pytest.mark.parametrize(
    ("options", "lower", "upper"),
    [({}, None, None), ({"clip_weight_min": 0.0}, 0.0, None), ({"clip_weight_min": -1, "clip_weight_max": 2}, -1, 2)],
)
def test_limits_of_weights(options, lower, upper):
    parameters = parameters_of(Adam(**options))
    limits = parameters.clipping_limits
    assert parameters.HasField("clipping_limits") == bool(options)
    assert (limits.lower.value if limits.HasField("lower") else None) == lower
    assert (limits.upper.value if limits.HasField("upper") else None) == upper


@pytest.mark.parametrize(
    ("clipvalue", "lower", "upper"),
    [
        (1.5, -1.5, 1.5),
        (0.0, 0.0, 0.0),
        ((None, 2.0), None, 2.0),
        ((-1.0, None), -1.0, None),
        ((None, None), None, None),
    ],
)
def test_limits_of_gradients(clipvalue, lower, upper):
    limits = parameters_of(SGD(clipvalue=clipvalue)).gradient_clipping_limits
    assert (limits.lower.value if limits.HasField("lower") else None) == lower
    assert (limits.upper.value if limits.HasField("upper") else None) == upper


@pytest.mark.parametrize(
    ("factor", "multiply", "written"),
    [
        (None, True, {}),
        (0.0, True, {}),
        (1e-60, True, {}),
        (0.5, None, {"weight_decay_factor": 0.5}),
        (0.5, False, {"weight_decay_factor": 0.5}),
        (0.5, True, {"weight_decay_factor": 0.5, "multiply_weight_decay_factor_by_learning_rate": True}),
    ],
)
def test_weight_decay(factor, multiply, written):
    parameters = parameters_of(
        Adagrad(weight_decay_factor=factor, multiply_weight_decay_factor_by_learning_rate=multiply)
    )
    found = {field.name: value for field, value in parameters.ListFields() if "decay" in field.name}
    assert found == written


def test_status_fields():
    assert parameters_of(SGD()).gradient_accumulation_status == 1
    assert parameters_of(SGD(use_gradient_accumulation=False)).gradient_accumulation_status == 2
    assert parameters_of(SGD()).low_dimensional_packing_status == 0
    assert parameters_of(SGD(low_dimensional_packing_status=True)).low_dimensional_packing_status == 1
    assert not parameters_of(SGD()).HasField("hot_id_replication_configuration")


def test_quantization():
    quantized = table(quantization_config=QuantizationConfig(256, -1.0, 0.0))
    simulated = write([FeatureConfig(quantized)]).table_descriptor[0].optimization_parameters.simulated_quantization
    assert (simulated.enabled, simulated.num_buckets) == (True, 256)
    assert (simulated.clipping_limits.lower.value, simulated.clipping_limits.upper.value) == (-1.0, 0.0)
    assert simulated.clipping_limits.HasField("upper")


class OwnAdagrad(Adagrad):
    """May do anything, so it must not be announced as Adagrad."""


@pytest.mark.parametrize(
    ("optimizer", "field", "found"),
    [
        (RowWiseAdagrad(), "parameters", "RowWiseAdagrad"),
        (Momentum(), "parameters", "Momentum"),
        (Lion(), "parameters", "Lion"),
        (CustomRowOptimizer(lambda g, r, s, lr, h: (r, ())), "parameters", "CustomRowOptimizer"),
        (OwnAdagrad(), "parameters", "OwnAdagrad"),
        (Adagrad(epsilon=1e-8), "adagrad", "epsilon=1e-08"),
        (Adam(l2=0.5), "adam", "l2=0.5"),
    ],
)
def test_what_has_no_place_is_named(optimizer, field, found):
    with pytest.raises(UnsupportedConfigField, match=f"Table 't', field '.*': Found {found}") as raised:
        parameters_of(optimizer)
    assert (raised.value.table, raised.value.field) == ("t", f"optimization_parameters.{field}")


def test_another_optimizer_class():
    with pytest.raises(ValueError, match="is an unsupported optimizer class"):
        write([FeatureConfig(TableConfig(4, 4, optimizer="adam"))])


def test_infinite_numbers_are_float32_too():
    assert parameters_of(SGD(clip_weight_max=np.inf)).clipping_limits.upper.value == np.inf


# ---- shapes ----


def shapes_of(features, **options):
    return [list(found.input_shape) for found in write(features, **options).feature_descriptor]


def test_shapes_from_the_batch():
    shared = table()
    features = [FeatureConfig(shared), FeatureConfig(shared, max_sequence_length=3)]
    assert shapes_of(features, batch_size=8, num_tensor_cores=4) == [[2], [2, 3]]
    assert shapes_of(features, batch_size=8, num_tensor_cores=4, num_cores_per_replica=2) == [[4], [4, 3]]


def test_own_shapes_come_before_the_batch_and_switch_sequences_off():
    feature = FeatureConfig(table(), max_sequence_length=3, output_shape=[2, 5])
    assert shapes_of([feature], batch_size=None) == [[2, 5]]


def test_given_shapes():
    shared = table()
    features = [FeatureConfig(shared), FeatureConfig(shared, output_shape=[None, 5]), FeatureConfig(shared)]
    assert shapes_of(features, output_shapes=[(7,), [np.int64(2), None], None]) == [[7], [2, 5], [4]]


@pytest.mark.parametrize("given_shape", [(2,), (2, 6), (3, 5)])
def test_shapes_that_contradict(given_shape):
    features = {"c": [FeatureConfig(table(), output_shape=[2, 5])]}
    with pytest.raises(ValueError, match=r"Inconsistent shape founded for input feature c/0"):
        write(features, output_shapes=[given_shape])


@pytest.mark.parametrize(
    ("own", "given_shape"), [([None], None), ([2, 0], None), (None, ()), (None, (2, -1)), (None, (2**31,))]
)
def test_shapes_that_are_not_known(own, given_shape):
    with pytest.raises(ValueError, match=r"Input Feature 0 has output shape set as \("):
        write([FeatureConfig(table(), output_shape=own)], output_shapes=[given_shape])


def test_one_shape_for_each_feature():
    with pytest.raises(ValueError, match="Found 2 output_shapes for 1 features"):
        write([FeatureConfig(table())], output_shapes=[None, None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": None}, "Found batch_size=None for 2 replicas"),
        ({"batch_size": 1}, "Found batch_size=1 for 2 replicas. Expected at least one sample"),
        ({"batch_size": 5}, "Found batch_size=5 for 2 replicas. Expected equal shares"),
        ({"num_cores_per_replica": 4}, "Expected whole replicas"),
        ({"generation": "2.4"}, "Found generation='2.4'"),
        ({"num_hosts": 0}, "field 'num_hosts': Found 0. Expected an integer from 1"),
        ({"num_tensor_cores": 0}, "field 'num_tensor_cores': Found 0"),
        ({"num_tensor_cores": 2.0}, "field 'num_tensor_cores': Found 2.0"),
        ({"num_cores_per_replica": 0}, "field 'num_cores_per_replica': Found 0"),
        ({"num_hosts": 2**31}, "field 'num_hosts': Found 2147483648"),
    ],
)
def test_sizes_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        write([FeatureConfig(table())], **options)


@pytest.mark.parametrize(("rows", "dim", "field"), [(2**63, 4, "vocabulary_size"), (4, 2**31, "dimension")])
def test_tables_too_large_for_the_message(rows, dim, field):
    huge = TableConfig(rows, dim, initializer=lambda shape: None, optimizer=SGD(), name="huge")
    with pytest.raises(UnsupportedConfigField, match=f"Table 'huge', field '{field}'"):
        write([FeatureConfig(huge)])


def test_too_many_buckets_for_the_message():
    quantized = table("q", quantization_config=QuantizationConfig(2**31, 0.0, 1.0))
    with pytest.raises(UnsupportedConfigField, match=r"Table 'q', field '.*num_buckets': Found 2147483648"):
        write([FeatureConfig(quantized)])


def test_model_parallelism():
    message = write([FeatureConfig(table())], num_cores_per_replica=2)
    assert message.spmd_sharding.enabled
    assert message.spmd_sharding.num_cores_per_replica == 2
    assert message.num_tensor_cores == 2


# ---- generation 2.3 ----


def test_2_3_counts_features():
    first, second = table("a"), table("b")
    features = [FeatureConfig(first), FeatureConfig(second, max_sequence_length=5), FeatureConfig(first, name="f")]
    message = write([*features, FeatureConfig(first, max_sequence_length=2)], generation="2.3")
    assert [found.num_features for found in message.table_descriptor] == [4, 5]
    assert message.batch_size_per_tensor_core == 4
    assert not message.feature_descriptor


def test_2_21_does_not_count():
    message = write([FeatureConfig(table())])
    assert message.batch_size_per_tensor_core == 0
    assert message.table_descriptor[0].num_features == 0


@given(batch_size=st.integers(1, 1000), num_tensor_cores=st.integers(1, 40))
def test_2_3_rounds_the_share_down(batch_size, num_tensor_cores):
    features, options = [FeatureConfig(table())], {"batch_size": batch_size, "num_tensor_cores": num_tensor_cores}
    if batch_size < num_tensor_cores:
        with pytest.raises(ValueError, match="at least one sample"):
            write(features, generation="2.3", **options)
    else:
        message = write(features, generation="2.3", **options)
        assert message.batch_size_per_tensor_core == batch_size // num_tensor_cores


def test_2_3_never_accumulates_for_sgd():
    assert parameters_of(SGD(), generation="2.3").gradient_accumulation_status == 2
    assert parameters_of(SGD(use_gradient_accumulation=False), generation="2.3").gradient_accumulation_status == 2
    assert parameters_of(Adagrad(), generation="2.3").gradient_accumulation_status == 1


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (table("t", AdagradMomentum()), "adagrad_momentum"),
        (table("t", SGD(clipvalue=0.0)), "gradient_clipping_limits"),
        (table("t", Adam(low_dimensional_packing_status=True)), "low_dimensional_packing_status"),
        (table("t", Adam(), quantization_config=QuantizationConfig(2, 0.0, 1.0)), "simulated_quantization"),
        (TableConfig(4, 4, name="t"), "parameters"),
    ],
)
def test_2_3_cannot_say_what_came_later(config, field):
    with pytest.raises(UnsupportedConfigField, match=r"Expected only what generation '2.3' can announce") as raised:
        write([FeatureConfig(config)], generation="2.3")
    assert (raised.value.table, raised.value.field) == ("t", f"optimization_parameters.{field}")


def test_2_3_has_no_shapes():
    with pytest.raises(UnsupportedConfigField, match="output_shape of a feature"):
        write([FeatureConfig(table(), output_shape=[4])], generation="2.3")
    with pytest.raises(ValueError, match=r"Found output_shapes for generation '2.3'"):
        write([FeatureConfig(table())], generation="2.3", output_shapes=[(4,)])
