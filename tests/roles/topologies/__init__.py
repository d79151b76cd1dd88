"""Whole topologies in one process, with the embedded model."""
