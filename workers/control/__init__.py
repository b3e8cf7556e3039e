"""What a job declares about the course of its run. Values only; the driver carries them out
(`orchestrator.api.early_stopping`, `orchestrator.events.callbacks`).

Read `stopping` first, which ends a run early; then `callback`, which hears how it goes.
"""
