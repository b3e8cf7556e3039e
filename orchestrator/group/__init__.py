"""The worker processes of one generation as the driver sees them: calls to all of them, and the watch for those that
stop answering.

How processes are started is the business of `orchestrator.cluster`.

Read `worker_group.py` first, then `watch.py`.
"""
