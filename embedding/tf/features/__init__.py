"""Inputs as TensorFlow's page has them: nested structures of ragged, sparse and dense arrays, and their shapes.

Read `structures.py` and `inputs.py` first; `bags.py` makes bags of inputs.
"""
