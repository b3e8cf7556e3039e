"""What is known before a run begins: what a step asks of each table, what it sends, and what memory it needs
(`podembed plan`). And the plans that older runs recorded, which they follow.

Read `traffic.py` first.
"""
