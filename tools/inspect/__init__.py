"""Programs that look at a run or tidy it: compare, export, look up, compact, forget, prune. None of them trains.

Read `inspect_run.py` first, then `diff.py`. Checking is in `tools.fsck`.
"""
