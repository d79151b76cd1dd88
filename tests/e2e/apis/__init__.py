"""What clients ask of real processes."""
