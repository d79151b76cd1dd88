"""What needs a CUDA device; skipped without one."""
