"""What a step asks of each table and what a host sends for it. Also the plans that older runs recorded, which they
follow.

Read `traffic.py` first.
"""
