"""What a worker says of itself, what the kernel says of it, and how it ends itself without a driver.

What follows from silence is decided in `orchestrator.group`.

Read `progress.py` first, then `lease_watch.py`.
"""
