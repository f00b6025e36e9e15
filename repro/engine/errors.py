"""The one exception that is meant for the user's eyes."""


class UserError(ValueError):
    """Input that cannot work. The message names the value, what is allowed, and the remedy.

    The command line prints it as one line and exits with code 2; anything else that is raised is a bug of ours."""
