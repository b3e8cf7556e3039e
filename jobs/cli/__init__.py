"""The command line: flags, and what `podembed train` and `podembed resume` do with them.

Read `main.py` first, then `launch.py`.
"""
