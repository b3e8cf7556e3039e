"""A commit as a version that servers answer with: its record, gates, the log of pointers.

Read `versions.py` first, then `publisher.py`.
"""
