"""One host at work: its tables, its lanes of the input, its steps, and how its shard comes back after a fault.

Sockets are in `workers.mesh`, files in `workers.checkpoint`, JAX in `workers.device`.

Read `host.py` first (the calls of the driver), then `generation.py`, `windows.py` and `step.py`.
"""
