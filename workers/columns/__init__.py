"""From decoded columns to checked numbers and table rows: nulls, unseen values, hashes and vocabularies are decided
here.

Files are opened elsewhere; here are arrays only.

Read `decode.py` first, then `id_columns.py`.
"""
