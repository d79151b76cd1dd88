"""How a cluster is started, looked at and ended."""
