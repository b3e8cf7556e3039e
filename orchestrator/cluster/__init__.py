"""Where worker processes run: on a Ray cluster, or in this process without Ray.

`connection.py` finds a cluster or starts one of the program's own, which `cluster_supervisor.py` ends. Where Ray may be imported is
kept by the architecture test.

Read `ray_backend.py` first, then `in_process.py`, which does the same without Ray.
"""
