"""What a host says of its rows from time to time, so that people see a table that collapses or does not train.

Only samples of rows are read, and nothing is changed. Read `look.py` first.
"""
