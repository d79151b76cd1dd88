"""The command line, and the composition root behind it.

`main` dispatches to one module per verb in `epd.cli.verbs`. Nothing here imports more than the
standard library at the top: a verb imports what it needs when it runs, so that `epd --help` answers
at once and a broken library is reported by `epd doctor` instead of breaking it.
"""
