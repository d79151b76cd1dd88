"""What kernels and steps cost: programs, and no tests."""
