"""The errors that end a command with one line instead of a traceback."""


class UserError(Exception):
    """A user's mistake, exit code 2: what is wrong, where, what was got and expected, how to mend it, on one line."""


class ProcessDied(Exception):
    """A process of the run went away under it (killed, out of memory), exit code 1: which one, and how to go on."""


class DiskError(UserError):
    """Something could not be written: no room, no rights, a broken disk."""
