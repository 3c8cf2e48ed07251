"""The commands: functions whose signatures and docstrings are the options and the help, as `signature` says.

Whatever takes long to import is imported by the function that uses it, so that `--help` is quick.
"""
