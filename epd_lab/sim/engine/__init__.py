"""Simulated engines: a golden model, the device that it computes on, and its memory."""
