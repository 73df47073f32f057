"""The command line: a module per verb, listed in commands.py."""
