"""Which instance should have which roles, by what waits."""
