"""What runs on one host: input, table shard, mesh, device process and files.

These are plain classes; Ray is in `workers.actors` and `workers.stepwise.actors` only. Read `host/host.py` first.
"""
