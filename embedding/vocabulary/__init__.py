"""Tables whose keys come and go: any 64-bit number or text is a key, gets a row when it is admitted, and may lose it.

Read `policies.py` first, what a user declares; then `dynamic_index.py`, the decisions of a step.
"""
