"""The mid-level API of `tf.tpu.experimental.embedding`: declaration, enqueue, dequeue, apply_gradients, and lookups for
serving.

It checks and reshapes what users pass; an engine does the work. Engines on several hosts live in `workers.stepwise`.

Read `embedding.py` first (a step), then `building.py` (the engine behind it) and `state.py`.
"""
