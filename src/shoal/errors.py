"""The one error a user is meant to read: what went wrong, and what to do next."""


class ShoalError(Exception):
    """A mistake we can explain. The command line prints `message` and `hint` and exits with 2."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(f"{message}\n{hint}" if hint else message)
        self.message = message
        self.hint = hint
