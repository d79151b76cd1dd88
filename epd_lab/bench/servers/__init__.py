"""Servers under load: times, goodput, accuracy."""
