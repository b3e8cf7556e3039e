"""`podembed calibrate`: measures what this machine takes for the parts of a step, with the project's own code.

Measurements run in child processes with the environment of a run's workers, alone and side by side. What they find is
a `Calibration`, which `orchestrator.decisions` turns into predicted times. Nothing here is used while a run trains.

Read `measure.py` first: it says what is measured and in which order. `lookups.py`, `exchange.py`, `device.py` and
`reading.py` measure; `process.py` is the child; `record.py` is the file.
"""
