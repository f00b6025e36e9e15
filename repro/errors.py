"""The one exception that is meant for the user's eyes, and how errors look in a notebook."""

from __future__ import annotations


class Brief(BaseException):
    """An exception whose message says all: IPython shows it in place of a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31m{type(self).__name__}\x1b[0m: {self}"]


class UserError(Brief, ValueError):
    """Input that cannot work. The message names the value, what is allowed, and the remedy.

    The command line prints it as one line and exits with code 2; anything else that is raised is a bug of ours."""


#: What a light set-up leaves out, as `import` names it.
_MODELS = {"accelerate", "datasets", "gguf", "torch", "transformers", "triton"}
#: What an installation without the extra `server` lacks.
_SERVER = {"fastapi", "prometheus_client", "starlette", "uvicorn"}


def left_out(error: ModuleNotFoundError) -> Exception:
    """What to raise for a package that is not there: a UserError if a light set-up leaves it out, else the error."""
    package = (error.name or "").partition(".")[0]
    if package in _SERVER:
        return UserError(f"the server needs {package}, which is not installed; run `make setup`, which adds it")
    if package not in _MODELS:
        return error
    return UserError(f"this needs {package}, which a light set-up leaves out; run `make setup`, which adds it")
