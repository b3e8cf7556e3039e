"""A run's folder: opened, checked, and the records in it. Also how a run is named by people and how it begins from
another one.

Read `run.py` first.
"""
