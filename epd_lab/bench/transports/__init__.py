"""Items through transports, between processes."""
