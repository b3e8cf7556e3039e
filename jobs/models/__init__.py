"""Dense halves of the jobs: from activations and dense features to logits.

Read `dlrm.py` first; `interaction.py` is the product of features that it shares with others.
"""
