"""What a program says to the trainer, and the small values that all of the driver shares: settings, policies, errors,
clock, signals.

Nothing here acts.

Read `config.py` first.
"""
