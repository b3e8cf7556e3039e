"""How a model leaves a run: what a commit says about data, metrics that judge it, and artifacts that score without
podembed.

What reads a run's folder takes no lease and starts no other process. The driver imports nothing of it.
"""
