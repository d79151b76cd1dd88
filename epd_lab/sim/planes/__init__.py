"""The control plane, the data plane and the shared disk, in simulation."""
