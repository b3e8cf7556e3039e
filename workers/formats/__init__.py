"""One reader for each kind of data file: Parquet, CSV, `.npy`, Criteo's text.

A reader turns a part of a file into columns; what they mean is decided in `workers.columns`.

Read `registry.py` first: it is the one place that tells the kinds apart.
"""
