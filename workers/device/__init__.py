"""The JAX process of a host: the dense model, its optimizer and the compiled step.

It holds no table rows, so a gang that aborts loses none. The rows lie with the process of `workers.host`.

Read `model_step.py` first, then `process.py`. `shared_memory.py` is the way between the two processes, and `doorway.py`
the door to it.
"""
