"""Checking what was committed or saved, byte by byte, and what to do about a damage. It changes nothing.

Read `check.py` first, then `findings.py` and `remedies.py`.
"""
