"""What a user declares about training data, and the values that travel from files to batches.

How a kind of file is read is said in `workers.formats`, which rows a host reads in `workers.input`.

Read `config.py` first, then `batch.py`.
"""
