"""Alarms: a planted fault for each detector, and none on clean runs."""
