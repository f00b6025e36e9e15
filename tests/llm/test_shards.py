"""Which part of a model each of two ranks holds: together they compute what it does (two threads of a process)."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from architectures import spread, tiny_config
from tiny import TINY

from repro.errors import UserError
from repro.llm import models, shards
from repro.llm.parts import Source, source_of
from repro.llm.shards import Part, Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


def whole(source):
    model = transformers.AutoModelForCausalLM.from_config(source.config, attn_implementation="eager").eval()
    spread(model)
    return model


def together(source, model):
    """Logits of two ranks that hold the halves of a model; the second one is given no tokens."""
    store, found, errors = torch.distributed.HashStore(), {}, []
    parts = []
    for rank in range(2):
        part, plan = source.empty(2)
        own = lambda path, module: dict(model.get_submodule(path).named_parameters(recurse=False))  # noqa: E731
        shards.fill(part, plan, Part(rank, 2), CPU, own)
        part.set_attn_implementation("eager")
        parts.append((part.eval(), plan))

    def run(rank):
        try:
            part, plan = parts[rank]
            shards.join(part, plan, Ranks(Part(rank, 2), CPU, store))
            with torch.no_grad():
                found[rank] = part(IDS.clone() if rank == 0 else IDS * 0, use_cache=False).logits
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return found


@pytest.mark.parametrize("model_type", ["opt", "llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "cohere", "olmo"])
def test_the_parts_compute_what_the_whole_does(model_type):
    source = Source(model_type, tiny_config(model_type), "float32")
    model = whole(source)
    found = together(source, model)
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-3)
    part, _ = source.empty(2)
    assert sum(one.numel() for one in model.parameters()) == part.num_parameters()


def test_a_sum_is_one_opaque_call_to_a_compiler():
    ranks = Ranks(Part(0, 1), CPU, torch.distributed.HashStore())
    row = shards.RowParallel(torch.nn.Linear(8, 4), ranks)
    compiled = torch.compile(lambda x: torch.relu(row(x)) * 2, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for count in (3, 5):
            x = torch.randn(count, 8)
            assert torch.equal(compiled(x), torch.relu(row(x)) * 2)


@pytest.mark.parametrize("model_type", ["gpt2", "phi3", "mixtral", "olmo2", "gpt_neox", "glm"])
def test_an_architecture_without_such_a_plan_is_refused(model_type):
    with pytest.raises(UserError, match="cannot be split over GPUs: .*; use num_gpus=1, or a model such as OPT"):
        Source(model_type, tiny_config(model_type), "float32").empty(2)


def test_what_transformers_does_not_begin_is_refused():
    with pytest.raises(UserError, match="cannot be loaded .transformers does not say how .* begins"):
        Source("apertus", tiny_config("apertus"), "float32").part(Part(0, 2), "cpu")


@pytest.mark.parametrize(
    "sizes, num_gpus, message",
    [
        ({"num_key_value_heads": 2}, 4, "num_gpus = 4: the 2 K/V heads of m cannot be split evenly.*use one of 1, 2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}, 2, "the 3 K/V heads"),
        ({"intermediate_size": 45}, 2, "the model.layers.0.mlp.gate_proj's 45 units"),
    ],
)
def test_what_does_not_divide_is_refused(sizes, num_gpus, message):
    config = transformers.LlamaConfig(**(TINY.to_dict() | {"head_dim": 8} | sizes))
    with pytest.raises(UserError, match=message):
        Source("m", config, "float32").empty(num_gpus)


def joined(parts, name, like):
    """A weight put together from its parts; the whole, if each has it."""
    own = [part.model.state_dict()[name] for part in parts]
    if own[0].shape == like.shape:
        assert all(torch.equal(own[0], one) for one in own)
        return own[0]
    dim = next(dim for dim in range(like.dim()) if own[0].shape[dim] != like.shape[dim])
    return torch.cat(own, dim)


@pytest.mark.parametrize("model_type", ["opt", "llama"])
@pytest.mark.parametrize("size", [2, 4])
def test_random_weights_are_the_same_for_any_number_of_gpus(model_type, size):
    config = tiny_config(model_type)
    config.num_key_value_heads = 4
    one = models.from_config(config, "m", seed=3, by_name=True)
    parts = [Source("m", config, "float32", 3).part(Part(rank, size), "cpu") for rank in range(size)]
    weights = one.model.state_dict()
    assert all(torch.equal(joined(parts, name, value), value) for name, value in weights.items())
    held = sum(parameter.numel() for parameter in parts[0].model.parameters())
    assert held < one.config.num_parameters == parts[0].config.num_parameters
    others = [
        models.from_config(config, "m", seed=4, by_name=True),
        models.from_config(config, "n", seed=3, by_name=True),
    ]
    name = next(name for name in weights if "layers.1" in name and "fc1.weight" in name or "up_proj" in name)
    assert all(not torch.equal(other.model.state_dict()[name], weights[name]) for other in others)
    assert weights[name].std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_a_checkpoint_is_read_by_parts(model_type, safe, tmp_path, monkeypatch):
    model = models.from_config(tiny_config(model_type), "m").model
    if safe:
        model.save_pretrained(tmp_path, max_shard_size="100KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)  # nothing is read whole
    else:
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    source = source_of(tmp_path)
    parts = [source.part(Part(rank, 2), "cpu") for rank in range(2)]
    assert all(torch.equal(joined(parts, name, value), value) for name, value in model.state_dict().items())
    monkeypatch.undo()
    assert source.eos == models.load(tmp_path).eos


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path):
    model = models.from_config(TINY, "m").model
    weights = {name: one for name, one in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(UserError, match="its safetensors files have no model.layers.1.mlp.up_proj.weight"):
        source_of(tmp_path).part(Part(0, 2), "cpu")
