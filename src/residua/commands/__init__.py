"""The commands, one module each: HELP, EXAMPLES, `add_arguments` and `run`, as `base.Command` says.

Whatever takes long to import is imported by the function that uses it, so that `--help` is quick.
"""
