"""Generators of hostile input, pure functions of a seed; each kind has a module."""
