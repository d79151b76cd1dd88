"""Generators of hostile input, each a pure function of a seed."""
