"""`podembed prepare`: text to Parquet with final ids, in parallel and restartable.

Training reads what it writes like any other Parquet files. Read `preparation.py` first, then `work.py`.
"""
