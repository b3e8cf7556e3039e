"""The message class: every message, field, enum and oneof by name and number, and bytes that come back as they went in.

The list below is written down a second time, from the field numbers, and the encoder of this file knows the wire format
only.
"""

import struct
import subprocess
import sys

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.tf.tpu_config.schema import TPUEmbeddingConfiguration, parse_config, serialize_config
from tests.long_tests import examples

# Message: [(number, name, type)]. "+" repeated, "|" in the oneof, otherwise a message, an enum in <>, or float unless
# f, b, i, l, s.
FIELDS = {
    "TPUEmbeddingConfiguration": [
        (1, "table_descriptor", "+TPUEmbeddingConfiguration.TableDescriptor"),
        (2, "mode", "<TPUEmbeddingConfiguration.Mode>"),
        (3, "batch_size_per_tensor_core", "i"),
        (4, "num_hosts", "i"),
        (5, "num_tensor_cores", "i"),
        (6, "sharding_strategy", "<TPUEmbeddingConfiguration.ShardingStrategy>"),
        (7, "pipeline_execution_with_tensor_core", "b"),
        (9, "profile_data_directory", "s"),
        (10, "feature_descriptor", "+TPUEmbeddingConfiguration.FeatureDescriptor"),
        (11, "spmd_sharding", "TPUEmbeddingConfiguration.SpmdSharding"),
    ],
    "TPUEmbeddingConfiguration.TableDescriptor": [
        (1, "name", "s"),
        (2, "vocabulary_size", "l"),
        (3, "dimension", "i"),
        (4, "num_features", "i"),
        (5, "optimization_parameters", "OptimizationParameters"),
    ],
    "TPUEmbeddingConfiguration.FeatureDescriptor": [(1, "name", "s"), (2, "table_id", "i"), (3, "input_shape", "+i")],
    "TPUEmbeddingConfiguration.SpmdSharding": [
        (1, "enabled", "b"),
        (2, "num_cores_per_replica", "i"),
        (3, "use_manual_partitioning", "b"),
        (4, "use_shardy_partitioner", "b"),
    ],
    "OptimizationParameters": [
        (13, "learning_rate", "LearningRate"),
        (2, "clipping_limits", "ClippingLimits"),
        (7, "gradient_clipping_limits", "ClippingLimits"),
        (16, "weight_decay_factor", "f"),
        (22, "multiply_weight_decay_factor_by_learning_rate", "b"),
        (27, "simulated_quantization", "SimulatedQuantization"),
        (17, "gradient_accumulation_status", "<GradientAccumulationStatus.Status>"),
        (28, "low_dimensional_packing_status", "<LowDimensionalPackingStatus.Status>"),
        (18, "hot_id_replication_configuration", "HotIdReplicationConfiguration"),
        (3, "adagrad", "|AdagradParameters"),
        (4, "stochastic_gradient_descent", "|StochasticGradientDescentParameters"),
        (5, "ftrl", "|FtrlParameters"),
        (6, "adam", "|AdamParameters"),
        (8, "momentum", "|MomentumParameters"),
        (9, "rms_prop", "|RmsPropParameters"),
        (10, "centered_rms_prop", "|CenteredRmsPropParameters"),
        (11, "mdl_adagrad_light", "|MdlAdagradLightParameters"),
        (12, "adadelta", "|AdadeltaParameters"),
        (14, "proximal_adagrad", "|ProximalAdagradParameters"),
        (19, "bounded_adagrad", "|BoundedAdagradParameters"),
        (20, "online_yogi", "|OnlineYogiParameters"),
        (21, "proximal_yogi", "|ProximalYogiParameters"),
        (23, "frequency_estimator", "|FrequencyEstimatorParameters"),
        (24, "user_defined_program", "|UserDefinedProgramParameters"),
        (25, "assign", "|AssignParameters"),
        (26, "adagrad_momentum", "|AdagradMomentumParameters"),
        (29, "lion", "|LionParameters"),
        (30, "frequency_aware_adagrad", "|FrequencyAwareAdagradParameters"),
    ],
    "ClippingLimits": [(1, "lower", "google.protobuf.FloatValue"), (2, "upper", "google.protobuf.FloatValue")],
    "google.protobuf.FloatValue": [(1, "value", "f")],
    "LearningRate": [(1, "constant", "|f"), (2, "dynamic", "|OptimizerDynamicInput")],
    "OptimizerDynamicInput": [(1, "tag", "i")],
    "SimulatedQuantization": [(1, "enabled", "b"), (2, "clipping_limits", "ClippingLimits"), (3, "num_buckets", "i")],
    "HotIdReplicationConfiguration": [(1, "status", "<HotIdReplicationConfiguration.Status>")],
    "AdagradParameters": [],
    "StochasticGradientDescentParameters": [],
    "AssignParameters": [],
    "UserDefinedProgramParameters": [(1, "program", "xla.HloModuleProto")],
    "xla.HloModuleProto": [],
    "AdagradMomentumParameters": [
        (1, "momentum", "f"),
        (2, "use_nesterov", "b"),
        (3, "exponent", "f"),
        (4, "beta2", "f"),
        (5, "epsilon", "f"),
    ],
    "FtrlParameters": [
        (1, "l1", "f"),
        (2, "l2", "f"),
        (3, "lr_power", "f"),
        (6, "multiply_linear_by_lr", "b"),
        (7, "beta", "f"),
        (8, "allow_zero_accumulator", "b"),
    ],
    "AdamParameters": [
        (3, "beta1", "f"),
        (4, "beta2", "f"),
        (5, "epsilon", "f"),
        (8, "use_non_lazy_adam", "b"),
        (10, "use_sum_inside_sqrt", "b"),
    ],
    "MomentumParameters": [(1, "momentum", "f"), (2, "use_nesterov", "b")],
    "LionParameters": [(1, "beta1", "f"), (2, "beta2", "f"), (3, "use_non_lazy_lion", "b")],
    "RmsPropParameters": [(1, "rho", "f"), (2, "momentum", "f"), (3, "epsilon", "f")],
    "CenteredRmsPropParameters": [(1, "rho", "f"), (2, "momentum", "f"), (3, "epsilon", "f")],
    "AdadeltaParameters": [(1, "rho", "f"), (2, "epsilon", "f")],
    "ProximalAdagradParameters": [(1, "l1", "f"), (2, "l2", "f")],
    "OnlineYogiParameters": [(1, "l1", "f"), (2, "l2", "f"), (3, "beta2", "f")],
    "ProximalYogiParameters": [
        (1, "l1", "f"),
        (2, "l2", "f"),
        (3, "beta1", "f"),
        (4, "beta2", "f"),
        (5, "epsilon", "f"),
    ],
    "BoundedAdagradParameters": [
        (1, "update_accumulator_first", "b"),
        (2, "max_var_update", "f"),
        (3, "max_accumulator", "f"),
    ],
    "FrequencyEstimatorParameters": [
        (1, "tau", "f"),
        (2, "max_delta", "f"),
        (3, "outlier_threshold", "f"),
        (4, "weight_exponent", "f"),
    ],
    "FrequencyAwareAdagradParameters": [
        (1, "l1_regularization_strength", "f"),
        (2, "l2_regularization_strength", "f"),
        (3, "max_lr_multiplier", "f"),
        (4, "probability_exponent", "f"),
        (5, "accumulator_decay", "f"),
        (6, "initial_accumulator_value", "f"),
        (7, "step_counter", "OptimizerDynamicInput"),
    ],
    "MdlAdagradLightParameters": [
        (1, "l2", "f"),
        (2, "lr_power", "f"),
        (3, "min_servable_mdl_benefit", "f"),
        (4, "mdl_mix_in_margin", "f"),
        (5, "mdl_benefit_rampup_coeff", "f"),
        (6, "mdl_min_weight", "f"),
        (7, "benefit_revisit_scale", "f"),
        (8, "max_event_benefit", "f"),
        (9, "max_total_benefit", "f"),
        (10, "mdl_hard_limit", "f"),
        (11, "hard_limit_min_benefit", "b"),
        (12, "mdl_regularize", "b"),
    ],
}
ENUMS = {
    "TPUEmbeddingConfiguration.Mode": {"UNSPECIFIED": 0, "INFERENCE": 1, "TRAINING": 2, "BACKWARD_PASS_ONLY": 3},
    "TPUEmbeddingConfiguration.ShardingStrategy": {"DIV_DEFAULT": 0, "MOD": 1},
    "GradientAccumulationStatus.Status": {"UNSPECIFIED": 0, "ENABLED": 1, "DISABLED": 2},
    "LowDimensionalPackingStatus.Status": {"UNSPECIFIED": 0, "ENABLED": 1, "DISABLED": 2},
    "HotIdReplicationConfiguration.Status": {"UNSPECIFIED": 0, "ENABLED": 1, "DISABLED": 2, "MIGRATION_ONLY": 3},
}
FIELD = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "f": FIELD.TYPE_FLOAT,
    "b": FIELD.TYPE_BOOL,
    "i": FIELD.TYPE_INT32,
    "l": FIELD.TYPE_INT64,
    "s": FIELD.TYPE_STRING,
}


def short(full_name: str) -> str:
    return full_name.removeprefix("tensorflow.tpu.")


def reachable(descriptor, found):
    if short(descriptor.full_name) in found:
        return found
    found[short(descriptor.full_name)] = descriptor
    for field in descriptor.fields:
        if field.message_type is not None:
            reachable(field.message_type, found)
    return found


MESSAGES = reachable(TPUEmbeddingConfiguration.DESCRIPTOR, {})


def declared_type(field) -> str:
    if field.message_type is not None:
        name = short(field.message_type.full_name)
    elif field.enum_type is not None:
        name = f"<{short(field.enum_type.full_name)}>"
    else:
        name = next(letter for letter, number in SCALARS.items() if number == field.type)
    is_repeated = field.has_presence is False and isinstance(field.default_value, list)
    return ("+" if is_repeated else "|" if field.containing_oneof else "") + name


def test_every_message_and_field_and_no_other():
    assert set(MESSAGES) == set(FIELDS)
    for name, descriptor in MESSAGES.items():
        found = sorted((field.number, field.name, declared_type(field)) for field in descriptor.fields)
        assert found == sorted(FIELDS[name]), name


def test_every_enum_value():
    enums = {
        short(field.enum_type.full_name): {value.name: value.number for value in field.enum_type.values}
        for descriptor in MESSAGES.values()
        for field in descriptor.fields
        if field.enum_type is not None
    }
    assert enums == ENUMS


def test_oneofs_and_reserved_numbers():
    oneofs = {name: [one.name for one in found.oneofs] for name, found in MESSAGES.items() if found.oneofs}
    assert oneofs == {"LearningRate": ["learning_rate"], "OptimizationParameters": ["parameters"]}
    file = descriptor_pb2.FileDescriptorProto.FromString(TPUEmbeddingConfiguration.DESCRIPTOR.file.serialized_pb)
    reserved = {
        message.name: [number for span in message.reserved_range for number in range(span.start, span.end)]
        for message in file.message_type
        if message.reserved_range
    }
    assert reserved == {"TPUEmbeddingConfiguration": [8], "OptimizationParameters": [1, 15]}


def test_enum_values_are_attributes():
    assert TPUEmbeddingConfiguration.TRAINING == 2
    assert TPUEmbeddingConfiguration.MOD == 1


def test_the_default_pool_is_left_alone():
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("tensorflow.tpu.TPUEmbeddingConfiguration")


def test_another_definition_of_the_same_names_may_live_in_the_process():
    """As when TensorFlow is imported, before or after."""
    program = """
from google.protobuf import descriptor_pb2, descriptor_pool
def other():
    file = descriptor_pb2.FileDescriptorProto(name="other.proto", package="tensorflow.tpu", syntax="proto3")
    file.message_type.add(name="TPUEmbeddingConfiguration")
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
if {first}:
    other()
from podembed.embedding.tf.tpu_config.schema import parse_config, serialize_config
if not {first}:
    other()
assert serialize_config(parse_config(bytes([0x10, 2]))) == bytes([0x10, 2])
"""
    for first in (True, False):
        subprocess.run([sys.executable, "-c", program.format(first=first)], check=True, timeout=300)


# ---- the wire, written by hand ----


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def tagged(number: int, wire_type: int, payload: bytes) -> bytes:
    return varint(number << 3 | wire_type) + payload


def delimited(number: int, payload: bytes) -> bytes:
    return tagged(number, 2, varint(len(payload)) + payload)


int32s = st.integers(-(2**31), 2**31 - 1)
float_bits = st.one_of(
    st.floats(width=32, allow_nan=False).map(lambda value: struct.pack("<f", value)),
    st.sampled_from([b"\0\0\0\0", b"\0\0\0\x80", b"\1\0\0\0", b"\0\0\xc0\x7f", b"\0\0\x80\xff"]),
)
unknown_values = st.one_of(
    st.integers(0, 2**64 - 1).map(lambda value: (0, varint(value))),
    st.binary(min_size=8, max_size=8).map(lambda value: (1, value)),
    st.binary(max_size=12).map(lambda value: (2, varint(len(value)) + value)),
    st.binary(min_size=4, max_size=4).map(lambda value: (5, value)),
)


@st.composite
def unknown_fields(draw, name: str) -> bytes:
    """What a writer with a newer schema adds: numbers that are not in use, in any order, also repeated."""
    known = {number for number, _, _ in FIELDS[name]}
    numbers = st.integers(1, 2**29 - 1).filter(lambda number: number not in known and not 19000 <= number < 20000)
    values = draw(st.lists(st.tuples(numbers, unknown_values), max_size=3))
    return b"".join(tagged(number, wire_type, payload) for number, (wire_type, payload) in values)


@st.composite
def scalar_field(draw, number: int, kind: str, *, always: bool) -> bytes:
    """One number or string; left out if it is the default, unless its presence is on the wire."""
    if kind == "s":
        text = draw(st.text(max_size=6)).encode()
        return delimited(number, text) if text or always else b""
    if kind == "f":
        bits = draw(float_bits)
        return tagged(number, 5, bits) if bits != b"\0\0\0\0" or always else b""
    integers = {"b": st.integers(0, 1), "i": int32s, "l": st.integers(-(2**63), 2**63 - 1)}
    value = draw(integers.get(kind, int32s))
    return tagged(number, 0, varint(value)) if value or always else b""


@st.composite
def encoded(draw, name: str) -> bytes:
    """Bytes of a message as a protobuf runtime writes them: known fields by number, then unknown ones."""
    alternatives = [number for number, _, kind in FIELDS[name] if kind.startswith("|")]
    chosen = draw(st.sampled_from([None, *alternatives]))
    out = b""
    for number, _, kind in sorted(FIELDS[name]):
        inner = kind.strip("+|")
        if number in alternatives and number != chosen:
            continue
        if inner in FIELDS:
            least, most = (1, 1) if number == chosen else (0, 2 if kind.startswith("+") else 1)
            parts = draw(st.lists(st.deferred(lambda inner=inner: encoded(inner)), min_size=least, max_size=most))
            out += b"".join(delimited(number, part) for part in parts)
        elif kind == "+i":
            sizes = draw(st.lists(int32s, max_size=3))
            out += delimited(number, b"".join(map(varint, sizes))) if sizes else b""
        else:
            out += draw(scalar_field(number, inner, always=number == chosen))
    return out + draw(unknown_fields(name))


@settings(max_examples=examples(100), deadline=None)
@given(encoded("TPUEmbeddingConfiguration"))
def test_any_bytes_come_back_unchanged(data):
    for given_data in (data, bytearray(data), memoryview(data)):
        assert serialize_config(parse_config(given_data)) == data


@pytest.mark.parametrize("name", FIELDS)
def test_bytes_of_each_message_come_back_unchanged(name):
    cls = message_factory.GetMessageClass(MESSAGES[name])

    @settings(max_examples=examples(12), deadline=None)
    @given(encoded(name))
    def check(data):
        assert cls.FromString(data).SerializeToString(deterministic=True) == data

    check()


@pytest.mark.parametrize(("name", "number", "field", "kind"), [(n, *f) for n, fields in FIELDS.items() for f in fields])
def test_each_field_is_read_under_its_number(name, number, field, kind):
    inner = kind.strip("+|")
    payloads = {
        "f": (tagged(number, 5, struct.pack("<f", 1.5)), 1.5),
        "b": (tagged(number, 0, b"\1"), True),
        "s": (delimited(number, "é".encode()), "é"),
        "i": (tagged(number, 0, varint(-3)), -3),
        "l": (tagged(number, 0, varint(2**40)), 2**40),
    }
    data, expected = payloads.get(inner, (tagged(number, 0, varint(1)), 1))
    if inner in FIELDS:
        data, expected = delimited(number, b""), None
    elif kind == "+i":
        data, expected = delimited(number, varint(300) + varint(7)), [300, 7]
    message = message_factory.GetMessageClass(MESSAGES[name]).FromString(data)
    value = getattr(message, field)
    if inner not in FIELDS:
        assert value == expected
    elif kind.startswith("+"):
        assert len(value) == 1
    else:
        assert message.HasField(field)
    assert [found.name for found, _ in message.ListFields()] == [field]
    assert message.SerializeToString(deterministic=True) == data


def test_presence():
    """A wrapper, a oneof and an empty message are on the wire because they are there, not because of their value."""
    message = TPUEmbeddingConfiguration()
    parameters = message.table_descriptor.add().optimization_parameters
    parameters.learning_rate.constant = 0.0
    parameters.clipping_limits.lower.value = 0.0
    parameters.adagrad.SetInParent()
    inside = delimited(2, delimited(1, b"")) + delimited(3, b"") + delimited(13, tagged(1, 5, bytes(4)))
    data = delimited(1, delimited(5, inside))
    assert serialize_config(message) == data
    read = parse_config(data).table_descriptor[0].optimization_parameters
    assert read.learning_rate.WhichOneof("learning_rate") == "constant"
    assert read.clipping_limits.HasField("lower")
    assert not read.clipping_limits.HasField("upper")
    assert read.WhichOneof("parameters") == "adagrad"


def test_an_unknown_enum_value_is_kept():
    data = tagged(2, 0, varint(77))
    assert parse_config(data).mode == 77
    assert serialize_config(parse_config(data)) == data


def test_the_program_of_a_user_defined_optimizer_is_kept_whole():
    program = delimited(1, b"name") + tagged(9, 0, varint(5)) + delimited(3, delimited(1, b"entry") + b"\x08\x01")
    data = delimited(1, delimited(5, delimited(24, delimited(1, program))))
    assert serialize_config(parse_config(data)) == data


def test_other_encodings_become_the_usual_one():
    shape = tagged(3, 0, varint(4)) + tagged(3, 0, varint(5))
    unusual = delimited(10, shape + delimited(1, b"f")) + tagged(7, 0, b"\1") + tagged(2, 0, b"\x82\x00")
    usual = tagged(2, 0, b"\2") + tagged(7, 0, b"\1") + delimited(10, delimited(1, b"f") + delimited(3, b"\4\5"))
    assert serialize_config(parse_config(unusual)) == usual


@settings(max_examples=examples(100), deadline=None)
@given(st.one_of(st.binary(max_size=40), encoded("TPUEmbeddingConfiguration").map(lambda data: data[:-1])))
def test_damaged_bytes_are_a_value_error_or_a_message(data):
    try:
        written = serialize_config(parse_config(data))
    except ValueError:
        with pytest.raises(ValueError, match="Expected a serialized TPUEmbeddingConfiguration"):
            parse_config(data)
    else:
        assert serialize_config(parse_config(written)) == written


@pytest.mark.parametrize("data", [b"\x08", delimited(9, b"\xff"), delimited(1, b"\x0a\x05a"), b"\xff" * 11])
def test_bytes_that_cannot_be_parsed(data):
    with pytest.raises(ValueError, match=f"Found {len(data)} bytes that do not parse"):
        parse_config(data)


@pytest.mark.parametrize("data", ["text", None, 3, [1, 2]])
def test_only_bytes_are_parsed(data):
    with pytest.raises(TypeError, match="Expected bytes"):
        parse_config(data)


@pytest.mark.parametrize("message", [None, b"", descriptor_pb2.FileDescriptorProto()])
def test_only_a_configuration_is_serialized(message):
    with pytest.raises(TypeError, match="Expected a TPUEmbeddingConfiguration message"):
        serialize_config(message)


def test_a_message_of_another_definition_is_serialized():
    """TensorFlow's own class has the same name and is another class."""
    file = descriptor_pb2.FileDescriptorProto(name="other.proto", package="tensorflow.tpu", syntax="proto3")
    field = file.message_type.add(name="TPUEmbeddingConfiguration").field.add(name="mode", number=2)
    field.type, field.label = FIELD.TYPE_INT32, FIELD.LABEL_OPTIONAL
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    cls = message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.tpu.TPUEmbeddingConfiguration"))
    assert serialize_config(cls(mode=2)) == tagged(2, 0, b"\2")
