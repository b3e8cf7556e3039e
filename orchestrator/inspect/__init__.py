"""Programs that look at a run or tidy it: check, compare, export, look up, compact, prune. None of them trains.

Read `inspect_run.py` first, then `fsck.py`.
"""
