"""What goes into a lookup and what comes out of it, by feature: nested structures, ragged and sparse inputs, shapes,
activations.

Values only; the tables that they meet are in `embedding.lookup`.

Read `structures.py` and `inputs.py` first, then `activations.py`.
"""
