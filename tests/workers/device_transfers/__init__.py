"""Tests of `workers/device/transfers`."""
