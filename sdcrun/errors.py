"""Errors that end a command with one line for the user."""

from __future__ import annotations


class UsageError(Exception):
    """The command line, the environment or a configuration file is wrong: one line on stderr, exit code 2."""
