"""`Engine`: the tables and lookups behind one `TPUEmbedding`, in one process or as one replica's side of a strategy.

It takes checked arrays; what users pass is checked in `embedding.tf.tpu_embedding`.

Read `engine.py` first, then `host_engine.py`.
"""
