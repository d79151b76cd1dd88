"""Plans that are drawn: topology, work, conditions and faults per seed."""
