"""What a step will take: predictions from tables, data and the constants of a machine, as values and as text.

Pure functions; `workers.calibration` measures machines, and `decisions.table_plan` says where tables lie.

Read `constants_table.py` first: it shows what a machine's constants are.
"""
