"""The process environment of every run: offline unless asked, and untouched by a reader's own settings.

It is applied by the command line and by the tests before anything else is imported, because the libraries read these
variables when they are imported. Standard library only, and good for Pythons that are too old for the rest."""

import os
import pwd
import shutil
import subprocess
from collections.abc import MutableMapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def nvidia_driver() -> bool:
    """Return whether an NVIDIA driver is present (whether torch can use it is another matter)."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:  # the tool can be there without a driver, so ask it for a GPU
        done = subprocess.run([tool, "-L"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=20)
        return done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def user_name(number: int) -> str:
    """Return a user's name, or the number where it has none: a container can have such users."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def is_writable(folder: Path) -> bool:
    """Return whether files can be made in a folder, or in its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(str(folder), os.W_OK | os.X_OK)


def wait_without_spinning(environ: "MutableMapping[str, str]") -> None:
    """Let OpenMP's threads wait without spinning, if that is set before a library loads it. Threads that spin take the
    cores from those that they wait for, wherever others use the same cores: a tour of a minute then takes seven."""
    for name, value in (("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "0"), ("KMP_BLOCKTIME", "0")):
        environ.setdefault(name, value)


def prepare_environment(environ: "MutableMapping[str, str]", private: bool = True) -> None:
    """Set what every run of this project needs in `environ`, leaving what the user has set as it is.

    No hub is asked for anything unless HUB=1: a machine without a network must not wait for one. Threads wait without
    spinning. With `private`, or where the home folder cannot be written, the folders of Jupyter, IPython, matplotlib
    and Triton lie below results/: a reader's own matplotlibrc or IPython start-up file must not change a figure."""
    if environ.get("HUB", "0") in ("", "0"):
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            environ.setdefault(name, "1")
    environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    wait_without_spinning(environ)
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # this environment's kernel, not the home's of the same name
    home_is_writable = is_writable(Path(os.path.expanduser("~")))
    if private or not home_is_writable:
        cache = Path(environ.get("REPRO_RESULTS_DIR") or ROOT / "results").resolve() / ".cache"
        for name, folder in (
            ("IPYTHONDIR", "ipython"),
            ("JUPYTER_CONFIG_DIR", "jupyter/config"),
            ("JUPYTER_DATA_DIR", "jupyter/data"),
            ("JUPYTER_RUNTIME_DIR", "jupyter/runtime"),
            ("MPLCONFIGDIR", "matplotlib"),
            ("TRITON_CACHE_DIR", "triton"),
        ):
            environ.setdefault(name, str(cache / folder))
        if not home_is_writable:
            environ.setdefault("HF_HOME", str(cache / "huggingface"))
