"""The driver's loop and what it needs at hand: generations, commits in the background, what the user sees.

Read `driver.py` first. It is the loop over generations; `generation.py` is one pass of it. What outlives a generation
is in `shared.py`. Which host should do what is decided in `decisions`; processes are called in `group`.
"""
