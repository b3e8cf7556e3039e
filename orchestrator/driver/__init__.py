"""The driver's loop and what it needs at hand: commits in the background, when to save, what the user sees.

Read `driver.py` first. It is the loop; everything else is called from it.
"""
