"""Tables and features to and from a serialized `TPUEmbeddingConfiguration`, the form in which TensorFlow's embedding
engine takes them.

`to_config` writes what `tf.tpu.experimental.embedding.TPUEmbedding` of TensorFlow 2.21 or 2.3 writes for the same
declarations. `from_config` reads any such message, or says which field asks for something that does not exist here. A
message does not hold combiners (they travel with the ids), initializers, first values of slots, or what happens to
invalid ids. Those come back as their defaults. The work is done in `proto_schema` (bytes and messages), `proto_write`,
`proto_read`, `proto_optimizers` and `learning_rate_tags`.
"""

from podembed.embedding.tf.tpu_config.checks import UnsupportedConfigField
from podembed.embedding.tf.tpu_config.learning_rate_tags import (
    LearningRateTags,
    TaggedLearningRate,
    check_learning_rates,
    learning_rate_tags,
    number_of_tags,
)
from podembed.embedding.tf.tpu_config.read import ReadConfig, from_config
from podembed.embedding.tf.tpu_config.schema import TPUEmbeddingConfiguration, parse_config, serialize_config
from podembed.embedding.tf.tpu_config.write import OutputShape, to_config

__all__ = [
    "LearningRateTags",
    "OutputShape",
    "ReadConfig",
    "TPUEmbeddingConfiguration",
    "TaggedLearningRate",
    "UnsupportedConfigField",
    "check_learning_rates",
    "from_config",
    "learning_rate_tags",
    "number_of_tags",
    "parse_config",
    "serialize_config",
    "to_config",
]
