"""What tells people, or programs that gather logs, how a run goes: a console, and lines of JSON.

A reporter gets the driver's events and changes nothing. The events have their sentences; here is decided how they look.

Read `console.py` first.
"""
