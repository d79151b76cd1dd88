"""Checkers of answers, as clients see them."""
