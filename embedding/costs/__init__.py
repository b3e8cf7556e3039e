"""What a step of lookups costs, as numbers: how much a host does in each phase, and how long this machine takes for it.

Pure functions of declared and measured values; nothing is timed here. `workers.calibration` measures the machine.

Read `work.py` first: it counts what a host does. `constants.py` turns counts into seconds, and finds the constants by
a fit to measured steps.
"""
