"""The driver of a run: one process that coordinates all hosts, commits what they made, and replaces those that fail.

What a program says to it is imported from `podembed`. Read `driver/driver.py` first.
"""
