"""How long tests wait for what must come."""

PATIENCE_S = 60.0  # on however busy a machine: only what never comes takes so long
