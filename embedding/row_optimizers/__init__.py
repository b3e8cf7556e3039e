"""The row optimizers, a file each: arguments and checks, slots, the compiled rule, its constants and its numpy oracle.

A new one is a file here and a line in the table of `embedding/optimizers.py`. The arrays belong to `table`; what all
kernels share is in `kernels/updates.py`.

Read `base.py` first, then `adagrad.py` as an example.
"""
