"""What goes into a lookup and what comes out of it, by feature: ids outside of a vocabulary, activations, their order.

Values only; the tables that they meet are in `embedding.lookup`. Read `activations.py` first.
"""
