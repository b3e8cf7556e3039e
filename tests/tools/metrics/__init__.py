"""The stream of measurements: what events become, where it goes, and how it is read back."""
