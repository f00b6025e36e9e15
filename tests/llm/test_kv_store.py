"""Moving blocks: any order of operations, batched into launches, gives what applying them one by one gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from repro.engine.config import ModelConfig
from repro.engine.memory import CacheOp, OpKind
from repro.errors import UserError
from repro.llm.kv_store import KVStore, batches

MODEL = ModelConfig("tiny", num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, num_parameters=0)
BLOCKS = 6
OPS = st.lists(
    st.builds(CacheOp, st.sampled_from(OpKind), st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), max_size=30
)


def store() -> KVStore:
    made = KVStore(MODEL, BLOCKS, 2, BLOCKS, torch.float32, torch.device("cpu"))
    for index, cache in enumerate(made.caches + made.cpu_caches):
        cache.copy_(torch.arange(cache.numel()).view(cache.shape) + 1000.0 * index)
    return made


@given(OPS)
def test_operations_take_effect_in_the_order_issued(ops):
    batched, plain = store(), store()
    batched.apply(ops)
    for kind, src, dst in ops:
        for gpu, cpu in zip(plain.caches, plain.cpu_caches):
            source = cpu if kind is OpKind.SWAP_IN else gpu
            target = cpu if kind is OpKind.SWAP_OUT else gpu
            target[dst] = source[src].clone()
    for ours, theirs in zip(batched.caches + batched.cpu_caches, plain.caches + plain.cpu_caches):
        assert torch.equal(ours, theirs)
    assert sum(batched.blocks_moved.values()) == len(ops)


@given(OPS)
def test_a_launch_holds_one_kind_and_nothing_that_depends_on_it(ops):
    runs = list(batches(ops))
    assert [op for run in runs for op in run] == ops
    for run in runs:
        targets = [op.dst for op in run]
        assert len({op.kind for op in run}) == 1 and len(set(targets)) == len(targets)
        if run[0].kind is OpKind.COPY:
            assert not {op.src for op in run} & set(targets) or all(op.src == op.dst for op in run if op.src in targets)


def test_independent_operations_share_a_launch():
    swaps = [CacheOp(OpKind.SWAP_OUT, block, block) for block in range(5)]
    copies = [CacheOp(OpKind.COPY, block, block + 3) for block in range(3)]
    assert [len(run) for run in batches(swaps + copies)] == [5, 3]


def test_a_pool_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match="does not fit into memory"):
        KVStore(MODEL, 1 << 45, 16, 0, torch.float32, torch.device("cpu"))
