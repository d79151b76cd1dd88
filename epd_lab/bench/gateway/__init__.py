"""The gateway, the bus and the roles without a model."""
