"""The trace of some steps, read back by the schema of its own format.

Read `reading` first: it turns a file into slices, and refuses one that Perfetto could not draw. Whole runs are in
`test_tracing`, and those of several hosts in `tests.orchestrator.driver.test_equality`.
"""
