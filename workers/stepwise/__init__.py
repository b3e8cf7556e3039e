"""The hosts behind `TPUEmbedding` in a `PodStrategy`, which get one call of a step at a time, and what needs this floor
without one: sharded tables, saved embeddings and checkpoints.

Training in windows is the business of `workers.host`.

Read `host.py` first.
"""
