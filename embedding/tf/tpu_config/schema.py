"""`TPUEmbeddingConfiguration` as a protobuf message class, built from its field numbers when this module is imported.

The tables below are the whole schema; the names are those of TensorFlow's public `tpu_embedding_configuration.proto`
and `optimization_parameters.proto`. The classes live in a descriptor pool of their own, so TensorFlow may be imported
in the same process. Parsing keeps unknown fields and unknown enum values, as TensorFlow's own parser does. What the
fields mean is in `read.py` and `write.py`.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2
from google.protobuf.message import DecodeError

PACKAGE = "tensorflow.tpu"

_FLOAT_VALUE = "google.protobuf.FloatValue"
_HLO_MODULE = "xla.HloModuleProto"

# Full type name within the package to its values, counted from 0.
ENUMS: dict[str, tuple[str, ...]] = {
    "GradientAccumulationStatus.Status": ("UNSPECIFIED", "ENABLED", "DISABLED"),
    "LowDimensionalPackingStatus.Status": ("UNSPECIFIED", "ENABLED", "DISABLED"),
    "HotIdReplicationConfiguration.Status": ("UNSPECIFIED", "ENABLED", "DISABLED", "MIGRATION_ONLY"),
    "TPUEmbeddingConfiguration.Mode": ("UNSPECIFIED", "INFERENCE", "TRAINING", "BACKWARD_PASS_ONLY"),
    "TPUEmbeddingConfiguration.ShardingStrategy": ("DIV_DEFAULT", "MOD"),
}

# Message to {field number: "[repeated] type name"}. A message named with a dot is nested in the one before the dot.
MESSAGES: dict[str, dict[int, str]] = {
    "ClippingLimits": {1: f"{_FLOAT_VALUE} lower", 2: f"{_FLOAT_VALUE} upper"},
    "SimulatedQuantization": {1: "bool enabled", 2: "ClippingLimits clipping_limits", 3: "int32 num_buckets"},
    "OptimizerDynamicInput": {1: "int32 tag"},
    "LearningRate": {1: "float constant", 2: "OptimizerDynamicInput dynamic"},
    "AdagradParameters": {},
    "AdagradMomentumParameters": {
        1: "float momentum",
        2: "bool use_nesterov",
        3: "float exponent",
        4: "float beta2",
        5: "float epsilon",
    },
    "BoundedAdagradParameters": {
        1: "bool update_accumulator_first",
        2: "float max_var_update",
        3: "float max_accumulator",
    },
    "FrequencyAwareAdagradParameters": {
        1: "float l1_regularization_strength",
        2: "float l2_regularization_strength",
        3: "float max_lr_multiplier",
        4: "float probability_exponent",
        5: "float accumulator_decay",
        6: "float initial_accumulator_value",
        7: "OptimizerDynamicInput step_counter",
    },
    "StochasticGradientDescentParameters": {},
    "FtrlParameters": {
        1: "float l1",
        2: "float l2",
        3: "float lr_power",
        6: "bool multiply_linear_by_lr",
        7: "float beta",
        8: "bool allow_zero_accumulator",
    },
    "AdamParameters": {
        3: "float beta1",
        4: "float beta2",
        5: "float epsilon",
        8: "bool use_non_lazy_adam",
        10: "bool use_sum_inside_sqrt",
    },
    "MomentumParameters": {1: "float momentum", 2: "bool use_nesterov"},
    "LionParameters": {1: "float beta1", 2: "float beta2", 3: "bool use_non_lazy_lion"},
    "RmsPropParameters": {1: "float rho", 2: "float momentum", 3: "float epsilon"},
    "CenteredRmsPropParameters": {1: "float rho", 2: "float momentum", 3: "float epsilon"},
    "MdlAdagradLightParameters": {
        1: "float l2",
        2: "float lr_power",
        3: "float min_servable_mdl_benefit",
        4: "float mdl_mix_in_margin",
        5: "float mdl_benefit_rampup_coeff",
        6: "float mdl_min_weight",
        7: "float benefit_revisit_scale",
        8: "float max_event_benefit",
        9: "float max_total_benefit",
        10: "float mdl_hard_limit",
        11: "bool hard_limit_min_benefit",
        12: "bool mdl_regularize",
    },
    "AdadeltaParameters": {1: "float rho", 2: "float epsilon"},
    "ProximalAdagradParameters": {1: "float l1", 2: "float l2"},
    "OnlineYogiParameters": {1: "float l1", 2: "float l2", 3: "float beta2"},
    "ProximalYogiParameters": {1: "float l1", 2: "float l2", 3: "float beta1", 4: "float beta2", 5: "float epsilon"},
    "FrequencyEstimatorParameters": {
        1: "float tau",
        2: "float max_delta",
        3: "float outlier_threshold",
        4: "float weight_exponent",
    },
    "UserDefinedProgramParameters": {1: f"{_HLO_MODULE} program"},
    "AssignParameters": {},
    "GradientAccumulationStatus": {},
    "LowDimensionalPackingStatus": {},
    "HotIdReplicationConfiguration": {1: "HotIdReplicationConfiguration.Status status"},
    "OptimizationParameters": {
        2: "ClippingLimits clipping_limits",
        3: "AdagradParameters adagrad",
        4: "StochasticGradientDescentParameters stochastic_gradient_descent",
        5: "FtrlParameters ftrl",
        6: "AdamParameters adam",
        7: "ClippingLimits gradient_clipping_limits",
        8: "MomentumParameters momentum",
        9: "RmsPropParameters rms_prop",
        10: "CenteredRmsPropParameters centered_rms_prop",
        11: "MdlAdagradLightParameters mdl_adagrad_light",
        12: "AdadeltaParameters adadelta",
        13: "LearningRate learning_rate",
        14: "ProximalAdagradParameters proximal_adagrad",
        16: "float weight_decay_factor",
        17: "GradientAccumulationStatus.Status gradient_accumulation_status",
        18: "HotIdReplicationConfiguration hot_id_replication_configuration",
        19: "BoundedAdagradParameters bounded_adagrad",
        20: "OnlineYogiParameters online_yogi",
        21: "ProximalYogiParameters proximal_yogi",
        22: "bool multiply_weight_decay_factor_by_learning_rate",
        23: "FrequencyEstimatorParameters frequency_estimator",
        24: "UserDefinedProgramParameters user_defined_program",
        25: "AssignParameters assign",
        26: "AdagradMomentumParameters adagrad_momentum",
        27: "SimulatedQuantization simulated_quantization",
        28: "LowDimensionalPackingStatus.Status low_dimensional_packing_status",
        29: "LionParameters lion",
        30: "FrequencyAwareAdagradParameters frequency_aware_adagrad",
    },
    "TPUEmbeddingConfiguration": {
        1: "repeated TPUEmbeddingConfiguration.TableDescriptor table_descriptor",
        2: "TPUEmbeddingConfiguration.Mode mode",
        3: "int32 batch_size_per_tensor_core",
        4: "int32 num_hosts",
        5: "int32 num_tensor_cores",
        6: "TPUEmbeddingConfiguration.ShardingStrategy sharding_strategy",
        7: "bool pipeline_execution_with_tensor_core",
        9: "string profile_data_directory",
        10: "repeated TPUEmbeddingConfiguration.FeatureDescriptor feature_descriptor",
        11: "TPUEmbeddingConfiguration.SpmdSharding spmd_sharding",
    },
    "TPUEmbeddingConfiguration.TableDescriptor": {
        1: "string name",
        2: "int64 vocabulary_size",
        3: "int32 dimension",
        4: "int32 num_features",
        5: "OptimizationParameters optimization_parameters",
    },
    "TPUEmbeddingConfiguration.FeatureDescriptor": {
        1: "string name",
        2: "int32 table_id",
        3: "repeated int32 input_shape",
    },
    "TPUEmbeddingConfiguration.SpmdSharding": {
        1: "bool enabled",
        2: "int32 num_cores_per_replica",
        3: "bool use_manual_partitioning",
        4: "bool use_shardy_partitioner",
    },
}

# Message to the name of its oneof and the numbers of the fields in it.
ONEOFS: dict[str, tuple[str, frozenset[int]]] = {
    "LearningRate": ("learning_rate", frozenset({1, 2})),
    "OptimizationParameters": (
        "parameters",
        frozenset({3, 4, 5, 6, 8, 9, 10, 11, 12, 14, 19, 20, 21, 23, 24, 25, 26, 29, 30}),
    ),
}

RESERVED: dict[str, tuple[int, ...]] = {"TPUEmbeddingConfiguration": (8,), "OptimizationParameters": (1, 15)}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "float": _Field.TYPE_FLOAT,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
}


def _descriptor_of(file: Any, name: str) -> Any:
    """The descriptor of a message of the file, made if it is not there yet."""
    outer, _, inner = name.rpartition(".")
    siblings = _descriptor_of(file, outer).nested_type if outer else file.message_type
    return next((known for known in siblings if known.name == inner), None) or siblings.add(name=inner)


def _add_field(message: Any, number: int, declaration: str) -> Any:
    *repeated, type_name, name = declaration.split()
    field = message.field.add(name=name, number=number)
    field.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    if type_name in _SCALARS:
        field.type = _SCALARS[type_name]
        return field
    field.type = _Field.TYPE_ENUM if type_name in ENUMS else _Field.TYPE_MESSAGE
    field.type_name = f".{type_name}" if type_name in (_FLOAT_VALUE, _HLO_MODULE) else f".{PACKAGE}.{type_name}"
    return field


def _file_descriptor() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="podembed/tpu_embedding_configuration.proto",
        package=PACKAGE,
        syntax="proto3",
        dependency=[wrappers_pb2.DESCRIPTOR.name, "podembed/hlo_module.proto"],
    )
    for name, fields in MESSAGES.items():
        message = _descriptor_of(file, name)
        oneof_name, oneof_numbers = ONEOFS.get(name, (None, frozenset()))
        if oneof_name:
            message.oneof_decl.add(name=oneof_name)
        for number, declaration in fields.items():
            field = _add_field(message, number, declaration)
            if number in oneof_numbers:
                field.oneof_index = 0
        for number in RESERVED.get(name, ()):
            message.reserved_range.add(start=number, end=number + 1)
    for name, values in ENUMS.items():
        outer, _, inner = name.rpartition(".")
        enum = _descriptor_of(file, outer).enum_type.add(name=inner)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    return file


def _configuration_class() -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)
    # Nothing here reads the program of a user-defined optimizer. Without a field everything in it is unknown, which is
    # kept as it came.
    hlo = descriptor_pb2.FileDescriptorProto(name="podembed/hlo_module.proto", package="xla", syntax="proto3")
    hlo.message_type.add(name="HloModuleProto")
    pool.AddSerializedFile(hlo.SerializeToString())
    pool.AddSerializedFile(_file_descriptor().SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.TPUEmbeddingConfiguration"))


TPUEmbeddingConfiguration: Any = _configuration_class()
"""The message class. Enum values are its attributes, as in `TPUEmbeddingConfiguration.TRAINING`."""


def parse_config(data: bytes | bytearray | memoryview) -> Any:
    """Returns the `TPUEmbeddingConfiguration` message in `data`; unknown fields and enum values are kept.

    Raises:
      TypeError: not bytes.
      ValueError: the bytes are no such message.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(
            f"Found {type(data).__name__} as configuration. Expected bytes. Pass message.SerializeToString()."
        )
    try:
        return TPUEmbeddingConfiguration.FromString(bytes(data))
    except (DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"Found {len(data)} bytes that do not parse ({error}). Expected a serialized TPUEmbeddingConfiguration. "
            "Pass the bytes whole and as they were written."
        ) from error


def serialize_config(message: Any) -> bytes:
    """Returns the bytes of a `TPUEmbeddingConfiguration` message, TensorFlow's own included; equal messages give equal
    bytes.

    Known fields come in the order of their numbers, then unknown ones in the order they were parsed in: what every
    protobuf runtime writes. So bytes that a runtime wrote come back unchanged.

    Raises:
      TypeError: another message, or none.
    """
    descriptor = getattr(message, "DESCRIPTOR", None)
    found = getattr(descriptor, "full_name", type(message).__name__)
    if found != TPUEmbeddingConfiguration.DESCRIPTOR.full_name:
        raise TypeError(
            f"Found {found} as configuration. Expected a TPUEmbeddingConfiguration message. Build it with to_config."
        )
    return message.SerializeToString(deterministic=True)
