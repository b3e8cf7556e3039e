"""What `podembed plan` prints: where tables would lie, what a step asks of them, and what memory a host needs.

Counted by the driver's own rules, from what `data_at_hand.py` finds out of the data. Read `tables.py` first.
"""
