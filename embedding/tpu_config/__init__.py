"""`TPUEmbeddingConfiguration`, the serialized form in which TensorFlow hands tables and features to its engine: written
and read.

Nothing else needs protobuf, and nothing here trains.

Read `schema.py` first, then `read.py`; `learning_rate_tags.py` numbers the learning rates that come with gradients.
"""
