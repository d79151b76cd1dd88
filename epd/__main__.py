"""`python -m epd`: the same as the `epd` command."""

from epd.cli.main import run

run()
