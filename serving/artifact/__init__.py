"""Models and rows as files: an exported model, which scores without podembed, and formats of exported rows.

Read `export_model.py` first, then `exported_model.py`, which is copied into each export.
"""
