"""The rows and slots that one host holds of a table, and the copies that saving and undo take of them.

Which host holds which rows is decided in `lookup`; files are the business of `workers.checkpoint`.

Read `table.py` first, then `row_store.py`, its memory. `embedding.row_index` finds the row of a key. `snapshot.py`
keeps one moment for a save, `undo_log.py` goes back.
"""
