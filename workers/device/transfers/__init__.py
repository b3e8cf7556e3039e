"""How the arrays of a step get between the memory of a host and its devices.

`ways.py` has the ways, and `pinned.py` the memory that devices read and write by themselves. Which way a run takes says
`workers/device/options.py`. Read `ways.py` first.
"""
