"""The commands: functions whose signatures and docstrings are the options and the help, as `signature` says.

A function imports slow modules itself, so that `--help` is quick.
"""
