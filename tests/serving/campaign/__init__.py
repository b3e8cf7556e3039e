"""Faults of serving: `python -m tests.serving.campaign`, or `make serving-faults`.

Read `schedule.py` first, then `kills.py`.
"""
