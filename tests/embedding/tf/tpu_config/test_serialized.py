"""Configurations as a whole: the bytes TensorFlow writes for the same declarations, and there and back again.

`RECORDED_2_21` and `RECORDED_2_3` are what `TPUEmbedding._create_config_proto` of TensorFlow 2.21.0 and 2.3.4 returned,
serialized.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import podembed.embedding.tf.tpu_config.serialized as config_proto
from podembed.embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from podembed.embedding.optimizers import FTRL, SGD, Adagrad, AdagradMomentum, Adam
from podembed.embedding.tf.tpu_config.serialized import (
    TPUEmbeddingConfiguration,
    from_config,
    parse_config,
    serialize_config,
    to_config,
)
from tests.long_tests import examples

OPTIMIZERS_2_21 = {
    "sgd": SGD(),
    "sgd_options": SGD(
        0.0,
        use_gradient_accumulation=False,
        clip_weight_min=0.0,
        clip_weight_max=2.5,
        weight_decay_factor=0.25,
        multiply_weight_decay_factor_by_learning_rate=True,
    ),
    "adagrad": Adagrad(0.1, low_dimensional_packing_status=True),
    "adagrad_flag_without_factor": Adagrad(
        0.1, weight_decay_factor=0.0, multiply_weight_decay_factor_by_learning_rate=True
    ),
    "adagrad_momentum": AdagradMomentum(
        0.5, momentum=0.9, use_nesterov=True, exponent=3, beta2=0.5, clipvalue=(None, 0.0)
    ),
    "ftrl": FTRL(
        0.5,
        -0.25,
        0.1,
        0.2,
        0.3,
        multiply_linear_by_learning_rate=True,
        allow_zero_accumulator=True,
        clipvalue=1.5,
    ),
    "ftrl_defaults": FTRL(),
    "adam": Adam(),
    "adam_options": Adam(0.5, 0.0, 0.5, 0.125, lazy_adam=False, sum_inside_sqrt=False),
    "no_optimizer": None,
}
RECORDED_2_21 = {
    "sgd": "0a150a0174100d18042a0c22006a050d0ad7233c88010110022005280552031a0108",
    "sgd_options": "0a290a0174100d18042a2012090a0012050d0000204022006a050d0000000085010000803e880102b0010110022005280552031a0108",
    "adagrad": "0a180a0174100d18042a0f1a006a050dcdcccc3d880101e0010110022005280552031a0108",
    "adagrad_flag_without_factor": "0a150a0174100d18042a0c1a006a050dcdcccc3d88010110022005280552031a0108",
    "adagrad_momentum": "0a300a0174100d18042a273a0212006a050d0000003f880101d201160d6666663f10011d00004040250000003f2dffe6db2e"
    "10022005280552031a0108",
    "ftrl": "0a3d0a0174100d18042a342a180dcdcccc3d15cdcc4c3e1d000080be30013d9a99993e40013a0e0a050d0000c0bf12050d0000c03f6a050d"
    "0000003f88010110022005280552031a0108",
    "ftrl_defaults": "0a1a0a0174100d18042a112a051d000000bf6a050d6f12833a88010110022005280552031a0108",
    "adam": "0a260a0174100d18042a1d32111d6666663f2577be7f3f2d95bfd63350016a050d6f12833a88010110022005280552031a0108",
    "adam_options": "0a210a0174100d18042a18320c250000003f2d0000003e40016a050d0000003f88010110022005280552031a0108",
    "no_optimizer": "0a070a0174100d180410022005280552031a0108",
    "quantized": "0a280a0174100d18042a1f22006a050d0000803f880101da0110080112090a050d000080bf120018800210022005280552031a0108",
    "nested": "0a180a077461626c655f30100418082a091a006a0212008801010a2b0a077461626c655f31100718022a1c32111d6666663f2577be7f3f2d95"
    "bfd63350016a04120208018801010a1a0a067365636f6e6410e80718102a0b22006a0412020801880101100220042808380152031a0110520610011a02"
    "100552070a02656d1a0110520610021a020607520a0a037a656410021a0110",
    "model_parallel": "0a150a0174100218012a0c22006a050d0000004088010110022002280852031a01025a0408011002",
}
OPTIMIZERS_2_3 = {
    "sgd": SGD(clip_weight_min=-1.0, weight_decay_factor=0.5),
    "adagrad": Adagrad(0.1, use_gradient_accumulation=False),
    "adam": Adam(0.5, lazy_adam=False),
}
RECORDED_2_3 = {
    "sgd": "0a260a0174100d180420012a1b12070a050d000080bf22006a050d0ad7233c85010000003f8801021002180820052805",
    "adagrad": "0a170a0174100d180420012a0c1a006a050dcdcccc3d8801021002180820052805",
    "adam": "0a2a0a0174100d180420012a1f32131d6666663f2577be7f3f2d95bfd633400150016a050d0000003f8801011002180820052805",
    "nested": "0a1a0a077461626c655f301004180820022a091a006a0212008801010a2e0a077461626c655f311007180220052a1d32111d6666663f"
    "2577be7f3f2d95bfd63350016a050d6f12833a8801010a1a0a067365636f6e6410e807181020032a0922006a02120088010210021810200428083801",
}


def written(features, **options):
    return serialize_config(to_config(features, **options)).hex()


def small(optimizer, quantization=None):
    table = TableConfig(13, 4, optimizer=optimizer, name="t", quantization_config=quantization)
    return [FeatureConfig(table)]


@pytest.mark.parametrize("name", OPTIMIZERS_2_21)
def test_each_optimizer_as_2_21_writes_it(name):
    features = small(OPTIMIZERS_2_21[name])
    assert written(features, num_hosts=5, num_tensor_cores=5, batch_size=40) == RECORDED_2_21[name]


def test_quantization_as_2_21_writes_it():
    features = small(SGD(1.0), QuantizationConfig(256, -1.0, 0.0))
    assert written(features, num_hosts=5, num_tensor_cores=5, batch_size=40) == RECORDED_2_21["quantized"]


def test_nested_features_as_2_21_writes_them():
    first, second = (lambda: 1.0), (lambda: 2.0)
    one = TableConfig(3, 8, optimizer=Adagrad(first))
    two = TableConfig(1000, 16, name="second", optimizer=SGD(second))
    three = TableConfig(7, 2)
    features = {
        "z": FeatureConfig(two, name="zed"),
        "a": [FeatureConfig(one), FeatureConfig(three, max_sequence_length=5)],
        "m": (FeatureConfig(one, name="em"), FeatureConfig(two, output_shape=[6, 7])),
    }
    found = written(
        features,
        num_hosts=4,
        num_tensor_cores=8,
        batch_size=128,
        optimizer=Adam(second),
        pipeline_execution_with_tensor_core=True,
    )
    assert found == RECORDED_2_21["nested"]


def test_model_parallelism_as_2_21_writes_it():
    features = [FeatureConfig(TableConfig(1, 1, optimizer=SGD(2.0), name="t"))]
    found = written(features, num_hosts=2, num_tensor_cores=8, num_cores_per_replica=2, batch_size=8)
    assert found == RECORDED_2_21["model_parallel"]


@pytest.mark.parametrize("name", OPTIMIZERS_2_3)
def test_each_optimizer_as_2_3_writes_it(name):
    options = {"num_hosts": 5, "num_tensor_cores": 5, "batch_size": 40, "generation": "2.3"}
    assert written(small(OPTIMIZERS_2_3[name]), **options) == RECORDED_2_3[name]


def test_nested_features_as_2_3_writes_them():
    rate = lambda: 1.0  # noqa: E731
    one = TableConfig(3, 8, optimizer=Adagrad(rate))
    two = TableConfig(1000, 16, name="second", optimizer=SGD(rate))
    three = TableConfig(7, 2)
    features = {
        "z": FeatureConfig(two, name="zed"),
        "a": [FeatureConfig(one), FeatureConfig(three, max_sequence_length=5)],
        "m": (FeatureConfig(one, name="em"), FeatureConfig(two, max_sequence_length=2)),
    }
    found = written(
        features,
        num_hosts=4,
        num_tensor_cores=8,
        batch_size=131,
        optimizer=Adam(),
        pipeline_execution_with_tensor_core=True,
        generation="2.3",
    )
    assert found == RECORDED_2_3["nested"]


@pytest.mark.parametrize("recorded", [*RECORDED_2_21.values(), *RECORDED_2_3.values()])
def test_recorded_bytes_are_read_and_come_back(recorded):
    message = parse_config(bytes.fromhex(recorded))
    assert serialize_config(message).hex() == recorded
    # Read without the model parallelism that one of them announces.
    message.ClearField("spmd_sharding")
    tables, features, _ = from_config(message)
    assert [table.name for table in tables] == [table.name for table in message.table_descriptor]
    assert {id(feature.table) for feature in features} == {id(table) for table in tables}


# ---- there and back ----

decimals = st.integers(-9999, 9999).map(lambda value: value / 1000)
at_least_zero = st.integers(0, 9999).map(lambda value: value / 1000)
above_zero = st.integers(1, 9999).map(lambda value: value / 10000)
below_one = st.integers(0, 9999).map(lambda value: value / 10000)


@st.composite
def common_options(draw):
    low, high = sorted(draw(st.tuples(decimals, decimals)))
    options = {
        "clip_weight_min": draw(st.sampled_from([None, low])),
        "clip_weight_max": draw(st.sampled_from([None, high])),
        "weight_decay_factor": draw(st.sampled_from([None, 0.25])),
        "low_dimensional_packing_status": draw(st.booleans()),
        "use_gradient_accumulation": draw(st.booleans()),
    }
    if options["weight_decay_factor"]:
        options["multiply_weight_decay_factor_by_learning_rate"] = draw(st.sampled_from([None, True]))
    if options["use_gradient_accumulation"]:
        options["clipvalue"] = draw(st.sampled_from([None, 1.5, (low, high), (None, high), (low, None)]))
    return options


@st.composite
def optimizers(draw, rates):
    options = {"learning_rate": draw(st.one_of(at_least_zero, st.sampled_from(rates)))} | draw(common_options())
    booleans = st.booleans()
    cls = draw(st.sampled_from([SGD, Adagrad, AdagradMomentum, FTRL, Adam]))
    if cls is AdagradMomentum:
        options |= {"momentum": draw(below_one), "use_nesterov": draw(booleans), "exponent": draw(above_zero)}
        options |= {"beta2": draw(below_one), "epsilon": draw(above_zero)}
    if cls is FTRL:
        options |= {"learning_rate_power": -draw(at_least_zero), "beta": draw(at_least_zero)}
        options |= {"l1_regularization_strength": draw(at_least_zero)}
        options |= {"l2_regularization_strength": draw(at_least_zero)}
        options |= {"multiply_linear_by_learning_rate": draw(booleans), "allow_zero_accumulator": draw(booleans)}
    if cls is Adam:
        options |= {"beta_1": draw(below_one), "beta_2": draw(below_one), "epsilon": draw(above_zero)}
        options |= {"lazy_adam": draw(booleans) or not options["use_gradient_accumulation"]}
        options |= {"sum_inside_sqrt": draw(booleans)}
    return cls(**options)


@st.composite
def declarations(draw):
    """Tables with everything a message can hold, and features that use all of them in order."""
    rates = [lambda: 0.1, lambda: 0.2, lambda: 0.3]
    tables = []
    for number in range(draw(st.integers(1, 4))):
        quantization = draw(st.sampled_from([None, QuantizationConfig(16, -0.1, 0.7)]))
        table = TableConfig(
            draw(st.integers(1, 2**40)),
            draw(st.integers(1, 64)),
            optimizer=draw(optimizers(rates)),
            name=f"table {number}",
            quantization_config=quantization,
        )
        tables.append(table)
    extra = draw(st.lists(st.sampled_from(tables), max_size=3))
    shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3)
    names = st.sampled_from([None, "f", "é"])
    features = [FeatureConfig(table, output_shape=draw(shapes), name=draw(names)) for table in tables + extra]
    return tables, features


@settings(max_examples=examples(80), deadline=None)
@given(declarations(), st.integers(1, 4))
def test_declarations_come_back_equal_and_write_the_same_bytes(declared, num_hosts):
    tables, features = declared
    options = {"num_hosts": num_hosts, "num_tensor_cores": num_hosts}
    message = to_config(features, **options)
    data = serialize_config(message)
    read = from_config(parse_config(data), config_proto.learning_rate_tags(tables).callables)
    for found, expected in zip(read.tables, tables, strict=True):
        assert found.vocabulary_size == max(expected.vocabulary_size, num_hosts)
        assert (found.name, found.dim, found.optimizer) == (expected.name, expected.dim, expected.optimizer)
        assert found.quantization_config == expected.quantization_config
    places = [tables.index(feature.table) for feature in features]
    assert [read.tables.index(feature.table) for feature in read.features] == places
    assert [(f.output_shape, f.name) for f in read.features] == [(f.output_shape, f.name) for f in features]
    assert serialize_config(to_config(read.features, **options)) == data


@settings(max_examples=examples(30), deadline=None)
@given(declarations())
def test_tags_stay_what_they_were_without_callables(declared):
    tables, features = declared
    data = serialize_config(to_config(features, num_hosts=1, num_tensor_cores=1))
    message = parse_config(data)
    read = from_config(message)
    expected = config_proto.learning_rate_tags(tables)
    assert config_proto.learning_rate_tags(read.tables).tags == expected.tags
    assert serialize_config(to_config(read.features, num_hosts=1, num_tensor_cores=1)) == data
    assert list(read.tables_by_tag) == list(range(config_proto.number_of_tags(message)))
    for tag, members in read.tables_by_tag.items():
        assert [read.tables.index(table) for table in members] == [
            n for n, own in enumerate(expected.tags) if own == tag
        ]


@settings(max_examples=examples(30), deadline=None)
@given(declarations())
def test_serializing_is_deterministic(declared):
    _, features = declared
    message = to_config(features, num_hosts=2, num_tensor_cores=2)
    again = TPUEmbeddingConfiguration()
    again.CopyFrom(message)
    assert (
        serialize_config(message) == serialize_config(again) == serialize_config(parse_config(serialize_config(again)))
    )


# ---- nothing is dropped in silence ----

# Read by the caller, not by from_config, or without any effect on a number; see its documentation.
LEFT_TO_THE_CALLER = {"num_hosts", "num_tensor_cores", "pipeline_execution_with_tensor_core", "sharding_strategy"}
# Says nothing as long as its companion is unset.
WITHOUT_EFFECT_ALONE = {
    "spmd_sharding.enabled",
    "spmd_sharding.num_cores_per_replica",
    "table_descriptor.optimization_parameters.simulated_quantization.num_buckets",
    "table_descriptor.optimization_parameters.simulated_quantization.clipping_limits.lower.value",
    "table_descriptor.optimization_parameters.simulated_quantization.clipping_limits.upper.value",
}


def leaves(descriptor, path=""):
    """Paths of all fields that hold a number or a string, and of the empty messages."""
    for field in descriptor.fields:
        inner = field.message_type
        if inner is not None and inner.fields:
            yield from leaves(inner, f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}", field


LEAVES = dict(leaves(TPUEmbeddingConfiguration.DESCRIPTOR))


def base():
    table = TableConfig(5, 4, optimizer=Adagrad(0.5), name="t")
    return to_config([FeatureConfig(table)], num_hosts=1, num_tensor_cores=1, batch_size=4)


def described(message):
    tables, features, by_tag = from_config(message)
    return repr(tables), repr(features), list(by_tag)


@pytest.mark.parametrize("path", LEAVES)
def test_every_field_changes_what_is_read_or_is_refused(path):
    """Each in turn, at a value that is not its default."""
    message, field = base(), LEAVES[path]
    target = message
    for parent in path.split(".")[:-1]:
        target = getattr(target, parent)
        target = target if hasattr(target, "DESCRIPTOR") else target[0]
    value = getattr(target, field.name)
    if field.message_type is not None:
        value.SetInParent()
    elif hasattr(value, "append"):
        value.append(3)
    else:
        setattr(target, field.name, "other" if isinstance(value, str) else type(value)(1) if not value else value + 1)
    assert message != base() or path.endswith(".adagrad")
    try:
        is_same = described(message) == described(base())
    except ValueError:
        with pytest.raises(ValueError, match=r"Found .*Expected "):
            from_config(message)
        assert path not in LEFT_TO_THE_CALLER
    else:
        allowed = LEFT_TO_THE_CALLER | WITHOUT_EFFECT_ALONE | {"table_descriptor.optimization_parameters.adagrad"}
        assert is_same == (path in allowed), path


def test_the_table_of_contents_is_complete():
    assert all(hasattr(config_proto, name) for name in config_proto.__all__)
