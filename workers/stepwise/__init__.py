"""The hosts behind `TPUEmbedding` in a `PodStrategy`, which get one call of a step at a time.

Training in windows is the business of `workers.host`.

Read `host.py` first.
"""
