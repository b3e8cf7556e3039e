"""What a commit of a run says about data, and how it leaves the run: evaluations, predictions and exported models.

All of it reads the run's folder, takes no lease and starts no other process. A run may be in training meanwhile.

Read `committed_model.py` first, then `evaluate.py`.
"""
