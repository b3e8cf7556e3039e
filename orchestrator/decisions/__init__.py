"""Decisions of the driver as functions of values: what a fault is charged to, which machines a run uses, where tables
lie.

Who carries them out is `orchestrator.driver`. Only `host_watch.py` looks at the cluster.

Read `failure.py` first, then `membership.py`.
"""
