"""The rows and slots that one host holds of a table.

Which host holds which rows is decided in `lookup`; files are the business of `workers.checkpoint`.

Read `table.py` first, then `stores`, where rows lie. `embedding.row_index` finds the row of a key.
"""
