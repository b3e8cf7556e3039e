"""The trace of some steps: the spans of all processes on one clock, in a file that Perfetto opens.

Read `tracing` first: when the driver begins and ends a trace, and what becomes of it after a fault. `clocks` finds out
how the clocks of processes differ, and `perfetto` writes the format. Each recording site documents its spans: see
`workers.tracing`.
"""
