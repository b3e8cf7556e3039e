"""The server: versions in memory, requests, and the program of HTTP around them.

Read `replica.py` first, then `scorer.py` and `app.py`.
"""
