"""`podembed evaluate | predict | export-model`: flags, and what is printed. What is done is in
`orchestrator.inference`.

Read `command.py` first.
"""
