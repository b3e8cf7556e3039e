"""The layout as bytes that `jax-tpu-embedding` reads and writes: its message `EmbeddingSpecProto`.

`create_proto_from_feature_specs` of the package writes it for a model. The classes are built from field numbers when
this module is imported, in a descriptor pool of their own. So the package may be loaded in the same process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from podembed.orchestrator.api.config import ConfigurationError
from podembed.tools.sparsecore.layout import PlacedTable, Stack, check_stack

SPECIFICATION_FILE = "embedding_spec.pb"
MAX_SPECIFICATION_BYTES = 64 << 20
_PACKAGE = "third_party.py.jax_tpu_embedding.sparsecore_lib_proto"
_Field = descriptor_pb2.FieldDescriptorProto
# Message to {field number: name}; a name with a message behind it is repeated. Others are int64, names are text.
_MESSAGES: dict[str, dict[int, str]] = {
    "FeatureSpecProto": {1: "feature_name", 4: "row_offset", 5: "col_offset", 6: "col_shift"},
    "TableSpecProto": {
        1: "table_name",
        2: "vocab_size",
        3: "embedding_dim",
        5: "max_ids_per_partition",
        6: "max_unique_ids_per_partition",
        7: "padded_vocab_size",
        8: "padded_embedding_dim",
        9: "row_offset_in_shard",
        10: "shard_rotation",
        11: "feature_specs FeatureSpecProto",
    },
    "StackedTableSpecProto": {
        1: "stack_name",
        2: "stack_vocab_size",
        3: "stack_embedding_dim",
        6: "total_sample_count",
        7: "max_ids_per_partition",
        8: "max_unique_ids_per_partition",
        9: "num_sparsecores",
        10: "table_specs TableSpecProto",
    },
    "EmbeddingSpecProto": {1: "stacked_table_specs StackedTableSpecProto"},
}


def _message_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="podembed/embedding_spec.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, declared in fields.items():
            field_name, _, type_name = declared.partition(" ")
            field = message.field.add(name=field_name, number=number, label=_Field.LABEL_OPTIONAL)
            if type_name:
                field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{type_name}"
            else:
                field.type = _Field.TYPE_STRING if field_name.endswith("_name") else _Field.TYPE_INT64
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.EmbeddingSpecProto"))


_EmbeddingSpec: Any = _message_class()


def to_bytes(stacks: Sequence[Stack]) -> bytes:
    """The message. Features, batches and limits are a model's business and left out."""
    message = _EmbeddingSpec()
    for stack in stacks:
        written = message.stacked_table_specs.add(
            stack_name=stack.name,
            stack_vocab_size=stack.num_rows,
            stack_embedding_dim=stack.dim,
            num_sparsecores=stack.num_cores,
        )
        for table in stack.tables:
            written.table_specs.add(
                table_name=table.name,
                vocab_size=table.num_rows,
                embedding_dim=table.dim,
                padded_vocab_size=table.padded_rows,
                padded_embedding_dim=stack.dim,
                row_offset_in_shard=table.row_offset,
                shard_rotation=table.rotation,
            )
    return message.SerializeToString(deterministic=True)


def from_bytes(data: bytes, name: str) -> tuple[Stack, ...]:
    """The stacks of a message.

    Args:
      name: name of the file, for messages.

    Raises:
      ConfigurationError: the bytes are no such message, or its tables do not fit into their stacks.
    """
    try:
        message = _EmbeddingSpec.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise _refused(name, f"{len(data)} bytes that do not parse") from error
    stacks = tuple(
        Stack(
            name=stack.stack_name,
            num_cores=stack.num_sparsecores,
            num_rows=stack.stack_vocab_size,
            dim=stack.stack_embedding_dim,
            tables=tuple(
                PlacedTable(
                    name=table.table_name,
                    num_rows=table.vocab_size,
                    dim=table.embedding_dim,
                    padded_rows=table.padded_vocab_size,
                    row_offset=table.row_offset_in_shard,
                    rotation=table.shard_rotation,
                )
                for table in stack.table_specs
            ),
        )
        for stack in message.stacked_table_specs
    )
    names = [table.name for stack in stacks for table in stack.tables]
    if not names or len(set(names)) < len(names) or len({stack.name for stack in stacks}) < len(stacks):
        raise _refused(name, f"tables {', '.join(names) or '(none)'}")
    for stack in stacks:
        check_stack(stack)
    return stacks


def _refused(name: str, found: str) -> ConfigurationError:
    return ConfigurationError(
        f"Found {found} in {name}. Expected an EmbeddingSpecProto of jax-tpu-embedding with each table once. Write "
        "create_proto_from_feature_specs(...).SerializeToString() there."
    )
