"""What happens to a run, as values: `Event` types, their sentences, and who learns of them.

The driver emits values. Each has a sentence for people, which no code reads again. What acts on an event looks at its
kind and fields.

Read `event.py` first, then `reporter.py`. The types are in `progress.py`, `commits.py`, `run.py` and `machines.py`.
"""
