"""One reader for each kind of data file: Parquet, CSV, `.npy`.

A reader turns a part of a file into columns; what they mean is decided in `workers.columns`. A new kind is a file, with
its declaration and its reader, and a line in the table of `registry.py`.

Read `registry.py` first: it is the one place that tells the kinds apart.
"""
