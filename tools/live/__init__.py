"""The live view of a run in a terminal, made of its folder alone: `podembed top`.

It only reads, so it may look at a run from anywhere that reaches its storage. The driver does not know of it.

Read `snapshot.py` first, then `view.py` and `watching.py`.
"""
