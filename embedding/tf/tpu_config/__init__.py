"""Writes and reads `TPUEmbeddingConfiguration`, the serialized form in which TensorFlow passes tables and features to
its engine.

Nothing else needs protobuf, and nothing here trains.

Read `schema.py` first, then `read.py`; `learning_rate_tags.py` numbers the learning rates that come with gradients.
"""
