"""Hostile input by rule: generators, pure functions of a seed, and what they are tried against."""
