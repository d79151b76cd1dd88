"""Generators of hostile input, one module for each kind: pure functions of a seed."""
