"""What a model takes of a card: by arithmetic, and by probes of a few layers."""
