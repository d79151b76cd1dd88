"""Checkers of memory: of whose it is, how much it is, and that it is given back."""
