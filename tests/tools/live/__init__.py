"""The live view: what it shows of runs and when it ends, on real files, in a real terminal and into a pipe.

Read `test_top.py` first.
"""
