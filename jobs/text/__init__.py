"""Text that is converted once, before training: files as blocks of whole lines, and the grammars of Criteo's click logs
and of CSV lines.

Read `blocks.py` first, then `criteo_lines.py`.
"""
