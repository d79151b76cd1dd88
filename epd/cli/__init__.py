"""The command line, and the composition root behind it.

`main` dispatches to one module per verb in `epd.cli.verbs`. At the top nothing here imports more
than the standard library: a verb imports the rest when it runs. So `epd --help` answers at once,
and `epd doctor` reports a broken library."""
