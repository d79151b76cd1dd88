"""Instances of several ranks: their processes, what passes between them, and their engines."""
