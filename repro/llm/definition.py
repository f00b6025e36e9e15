"""What a model's greedy tokens are by definition: those of an untouched transformers model with the same weights."""

import copy

import torch
from transformers import AutoModelForCausalLM

from repro.llm.models import LoadedModel


def generate(
    loaded: LoadedModel, prompts: list[list[int]], num_tokens: int
) -> tuple[list[list[int]], list[list[float]]]:
    """`num_tokens` greedy tokens for each prompt (token ids), and by how much each token's logit was the best."""
    config = copy.deepcopy(loaded.model.config)
    config.eos_token_id = None  # as many tokens of each as asked for
    model = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype, attn_implementation="sdpa").eval()
    model.load_state_dict(loaded.model.state_dict())
    longest = max(map(len, prompts))
    token_ids, mask = (
        torch.tensor([[0] * (longest - len(prompt)) + row for prompt, row in zip(prompts, rows)])
        for rows in (prompts, [[1] * len(prompt) for prompt in prompts])
    )
    with torch.no_grad():
        asked = dict(do_sample=False, max_new_tokens=num_tokens, return_dict_in_generate=True, output_logits=True)
        made = model.generate(token_ids, attention_mask=mask, pad_token_id=0, **asked)
    best = torch.stack([logits.topk(2).values for logits in made.logits], dim=1)
    return made.sequences[:, longest:].tolist(), (best[..., 0] - best[..., 1]).tolist()
