"""Virtual time: the loop, processes, their clock, keyed randomness, and what keeps all else out."""
