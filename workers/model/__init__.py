"""The dense half of a job: what a model is given and returns, and how models of frameworks fit.

It knows JAX, and neither jobs nor hosts. `workers.device.dense_half` puts models and losses of a job to work.

Read `contract.py` first, then `context.py`.
"""
