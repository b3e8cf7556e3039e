"""What reads a run beside it or after it: reports, the live view, health, damage, differences, other formats.

Nothing here takes part in training. The driver imports nothing of it.
"""
