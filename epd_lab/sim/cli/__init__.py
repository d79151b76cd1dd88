"""The verbs of `epd sim`."""
