"""The mesh: one trusted TCP connection between every two hosts of a generation, and the exchange of bytes over all of
them.

It knows frames, ranks and deadlines. What the bytes mean is the business of `workers.host`.

Read `mesh.py` first, then `setup.py` and `link.py`.
"""
