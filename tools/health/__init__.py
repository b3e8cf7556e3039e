"""What is wrong with a run, in sentences with numbers and a remedy: detectors over its stream of points.

The driver shows them its points one by one, and `podembed health` those of a run's folder. Both come to the same
alarms, since a detector sees nothing else. Detectors are small and never wait.

Read `alarms.py` first, then `watch.py` and one of the detectors, such as `speed.py`.
"""
