"""The one error that a user's input can cause. The command line prints it on one line and exits with 2."""


class UserError(Exception):
    """What is wrong, where, what was got and expected, and how to mend it: one line, no traceback."""
