"""`podembed chaos`: a job with injected faults, compared with the same job undisturbed. A program that users run, no
part of the driver.

Read `command.py` first, then `schedule.py` and `oracles.py`.
"""
