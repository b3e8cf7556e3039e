"""The report of one or several runs: one HTML file that needs no network.

It reads the records, commits, history and measurements of runs, and changes nothing in them. Everything that comes from
a run is text to be escaped, never markup.

Read `page.py` first, then `material.py`, `curves.py`, `sections.py` and `markup.py`.
"""
