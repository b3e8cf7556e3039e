"""What a process did and when, for a trace of some steps that the driver asks for.

Read `recorder` first: every process of a generation has one. It is off, and costs a look at a flag, until a trace is
asked. What they recorded is gathered into one file.
"""
