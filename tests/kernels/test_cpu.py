"""What the CPU runs, against the references: unused slots are NaN, unused table entries point far outside the pool."""

import pytest
import torch

from repro import kernels
from repro.kernels import cpu, reference

FAR = 1 << 30
LENS = [1, 16, 63, 64, 65, 0, 200, 1100, 90, 255, 64]


def paged(lens, num_heads, num_kv_heads, head_dim, block_size, dtype):
    """(q, k_cache, v_cache, block_table, context_lens), with random contexts in random blocks."""
    generator = torch.Generator().manual_seed(1)
    counts = [-(-length // block_size) for length in lens]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    k_cache, v_cache = torch.full((2, len(order), block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    table, first = torch.full((len(lens), max(counts)), FAR, dtype=torch.int32), 0
    for row, (length, count) in enumerate(zip(lens, counts)):
        table[row, :count] = order[first : first + count]
        for position in range(length):
            for cache in (k_cache, v_cache):
                vector = torch.randn(num_kv_heads, head_dim, generator=generator).to(dtype)
                cache[table[row, position // block_size], position % block_size] = vector
        first += count
    q = torch.randn(num_heads, len(lens), head_dim, generator=generator).to(dtype).transpose(0, 1)
    return q, k_cache, v_cache, table, torch.tensor(lens, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim, block_size", [(4, 4, 16, 16), (6, 2, 20, 4), (8, 1, 8, 1)])
def test_decoding_many_at_a_time_is_the_references(num_heads, num_kv_heads, head_dim, block_size, dtype):
    given = paged(LENS, num_heads, num_kv_heads, head_dim, block_size, dtype)
    exact = reference.paged_decode_attention(*(x.double() if x.is_floating_point() else x for x in given), 0.3, 1100)
    ours, plain = (one.paged_decode_attention(*given, 0.3, 1100).double() for one in (kernels, reference))
    assert (ours - exact).norm() <= 2 * max((plain - exact).norm(), 1e-7 * exact.norm())
    assert not ours[LENS.index(0)].any()


def test_a_sequence_gets_the_same_bits_whatever_else_is_in_the_batch():
    q, k_cache, v_cache, table, lens = paged(LENS, 6, 2, 32, 16, torch.float32)
    together = cpu.paged_decode_attention(q, k_cache, v_cache, table, lens, 0.2, 1100)
    for rows in (slice(row, row + 1) for row in range(len(LENS))):
        alone = cpu.paged_decode_attention(q[rows], k_cache, v_cache, table[rows], lens[rows], 0.2, 1100)
        assert alone.equal(together[rows])


def test_writing_is_the_references():
    k, v = torch.randn(2, 5, 2, 8)
    for slots in ([3, 60, 17, 0, 9], [3, -1, 17, -1, 9]):
        ours, plain = torch.zeros(2, 2, 4, 16, 2, 8)
        kernels.write_kv(k, v, *ours, torch.tensor(slots))
        reference.write_kv(k, v, *plain, torch.tensor(slots))
        assert ours.equal(plain) and ours.any()
