"""Scores of a committed state in one process, without hosts: rows are read by need, and nothing is trained.

Which commit is read, and what becomes of the scores, is decided in `orchestrator.inference`.

Read `pooled_rows.py` first, then `trained_forward.py`.
"""
