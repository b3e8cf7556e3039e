"""What a training step measures beside its work: scores in bins, and norms of the dense half.

`step_measures.py` is part of the compiled step. `window.py` counts what the steps of a window left. Nothing here
changes what is trained. Read `step_measures.py` first.
"""
