"""How a model leaves a run: what a commit says about data, and artifacts that score without podembed.

All of it reads the run's folder, takes no lease and starts no other process. The driver imports nothing of it.
"""
