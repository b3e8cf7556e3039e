"""What a run measures, as one stream of points; where the stream goes; and how it is read back.

The driver's events are the only source. Sinks run in threads of their own, so none of them can stop training. What a
sink shows to people, such as a report, is not made here.

Read `catalog.py` first (all names), then `measurer.py`, `hub.py` and `reading.py`.
"""
