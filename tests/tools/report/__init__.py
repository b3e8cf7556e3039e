"""Reports of runs that were really trained: their content, their markup, and the page in a real browser.

Read `test_page.py` first.
"""
