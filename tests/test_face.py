"""What `import repro` offers: every name, imported when it is first used and no earlier."""

import json
import subprocess
import sys

import pytest

import repro


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import json, sys, repro; assert dir(repro); print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = json.loads(out)
    assert not {"torch", "numpy", "pandas", "transformers", "matplotlib", "yaml"} & set(loaded)
    assert [name for name in loaded if name.startswith("repro")] == ["repro"]


def test_what_needs_no_model_comes_without_torch() -> None:
    program = """
import sys, repro
run = repro.serve("vllm", "opt-13b", repro.make_trace("sharegpt", 1.0, 20.0, seed=0), usage_every_s=1.0)
assert run.latency_s_per_token > 0 and len(run.usage)
repro.register(repro.contiguous_system("mine", lambda request, max_model_len: request.output_tokens))
repro.open("fig02_memory_waste"), repro.SYSTEMS["mine"], repro.DEPLOYMENTS, repro.UserError, repro.SamplingParams()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_without_torch_what_needs_it_says_so_in_a_sentence(package: str) -> None:
    program = f"""
import sys, repro
sys.modules[{package!r}] = None
try:
    repro.LLM("smollm2")
except repro.UserError as error:
    print(error)
from repro.harness.point import Point
from repro.harness.computing import Task, failure
try:
    import {package}
except ModuleNotFoundError as error:
    print(failure(Task("key", "a point", Point(print, {{}}, ""), {{}}), error).kind)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out == f"this needs {package}, which a light set-up leaves out; run `make setup`, which adds it\nuser\n"


@pytest.mark.parametrize("name", repro.__all__)
def test_every_name_is_there_and_in_the_docstring(name: str) -> None:
    assert getattr(repro, name) is not None
    assert name in dir(repro)
    assert f"\n    {name} " in (repro.__doc__ or "")


def test_each_name_is_the_object_itself() -> None:
    from repro.harness import experiment
    from repro.llm import models
    from repro.simulate import serve

    assert repro.open is experiment.open
    assert repro.serve is serve.serve
    assert repro.model_from_config is models.from_config
    assert repro.PreemptionMode.SWAP.value == "swap"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        repro.LLMs  # noqa: B018
