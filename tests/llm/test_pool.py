"""The boot line promises what one request may have, and the engine keeps to it."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import TINY

from repro.engine.sequence import SamplingParams
from repro.engine.systems import SYSTEMS
from repro.errors import UserError
from repro.llm import LLM, models
from repro.llm.pool import PoolSize

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny() -> models.LoadedModel:
    return models.from_config(TINY, "tiny")


@pytest.mark.parametrize("cap", [16, 2560])
@pytest.mark.parametrize("num_blocks", [9, 200])
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_longest_request_of_the_boot_line_runs_and_a_longer_one_does_not(tiny, system, num_blocks, cap):
    options = dict(max_num_seqs=8, max_num_batched_tokens=cap)
    llm = LLM(tiny, system=system, block_size=4, pool=PoolSize(num_blocks=num_blocks), quiet=True, **options)
    if "too small for any request" in llm.boot_line:
        with pytest.raises(UserError, match="does not fit into an empty pool"):
            llm.generate([[5]], SamplingParams(max_tokens=1), progress=False)
        return
    longest = int(re.search(r"concurrency for (\d+) tokens", llm.boot_line)[1])
    stated = re.search(r"prompts of up to (\d+)", llm.boot_line)
    prompt = int(stated[1]) if stated else longest - 1

    def generate(prompt_tokens: int, output_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=output_tokens)
        llm.generate([[5] * prompt_tokens], params, progress=False)

    generate(prompt, longest - prompt)
    assert prompt <= (longest - 1 if system == "vllm-v1" else min(cap, longest - 1))  # which cuts prompts
    with pytest.raises(UserError):
        generate(prompt, longest - prompt + 1)
    if prompt < longest - 1:
        with pytest.raises(UserError, match="raise that cap"):
            generate(prompt + 1, 1)
