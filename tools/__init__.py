"""What follows a run or reads it later: measurements and where they go, alarms, reports, the live view, damage,
differences, other formats.

Nothing here takes part in training. The driver imports nothing of it: who starts a run puts measurements and alarms in
the way of its events.
"""
