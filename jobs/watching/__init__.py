"""The commands that show a run to people: `podembed report` and `podembed top`.

Both only read. What they show is made in `orchestrator.report` and `orchestrator.live`.

Read `command.py` first.
"""
