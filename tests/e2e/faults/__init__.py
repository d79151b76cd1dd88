"""Processes that end, stand still or are overrun."""
