"""One module per verb. Each has SUMMARY, DESCRIPTION, EXAMPLES, `add_arguments(parser)`, and
`run(args) -> int`, the exit status."""
