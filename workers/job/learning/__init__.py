"""How well a job learns, in numbers that hosts add up.

Numbers only, without JAX. The devices count, the driver adds up and makes figures. Read `window_figures.py` first.
"""
