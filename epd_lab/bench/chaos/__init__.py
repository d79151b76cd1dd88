"""Faults of real processes under load, and what they cost."""
