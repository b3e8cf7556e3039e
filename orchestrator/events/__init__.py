"""What happens to a run, as values: `Event` types, their sentences, and who is told.

The driver emits values. A sentence is made of one in `sentences.py` and nowhere else, and no code reads it again: what
acts on an event looks at its kind and fields.

Read `event.py` first, then `reporter.py`. The types are in `progress.py`, `commits.py`, `run.py` and `machines.py`.
"""
