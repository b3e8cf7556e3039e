"""What the pages of TensorFlow describe: `TPUEmbedding`, its configuration, replicas, and optimizers as in Keras.

The tables and lookups below know nothing of it. Read `tpu_embedding/embedding.py` first.
"""
