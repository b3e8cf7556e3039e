"""What `podembed plan` prints: where tables would lie, what a step asks of them, and what memory a host needs.

Counted by the driver's own rules, before a run. Read `tables.py` first.
"""
