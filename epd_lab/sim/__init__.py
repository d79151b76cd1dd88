"""The deterministic simulator: production roles on virtual time, simulated planes and engines.

See docs/simulation.md.  Nothing here imports torch, zmq or numpy.
"""
