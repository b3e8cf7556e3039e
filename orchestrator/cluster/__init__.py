"""Where worker processes run: on a Ray cluster, or in this process without Ray.

`connection.py` finds a cluster or starts one of the program's own, which `cluster_supervisor.py` ends. The architecture
test knows where Ray may be imported.

Read `ray_backend.py` first, then `in_process.py`, which does the same without Ray.
"""
