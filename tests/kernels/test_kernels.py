"""The Triton kernels against float64 and against their plain-torch references.

Without a GPU they run under Triton's interpreter on small shapes; with one, on the GPU over a larger grid. Pools sit in
guard regions of NaN, unused slots are NaN, unused table entries point far outside the pool, blocks are in random
order."""

import itertools

import pytest
import torch

from repro import kernels
from repro.errors import UserError
from repro.kernels import reference

decode = pytest.importorskip("repro.kernels.decode", reason="needs Triton")
import triton.language as tl
from triton.runtime import interpreter

from repro.kernels import blocks, prefill, write

pytestmark = [pytest.mark.usefixtures("one_thread", "language_patched_once"), pytest.mark.heavy(60)]

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = [torch.float16, torch.bfloat16]
DTYPES = [*HALF, torch.float32]
LENS = [1, 16, 33, 70] + ([255, 1000, 2500] if GPU else [])
FAR = 1 << 30  # a table entry that no kernel may follow


@pytest.fixture(scope="module")
def language_patched_once():
    """Triton's interpreter patches its language anew for each call of a device function, a third of its time; here only
    where the patches of this launch are not in place."""
    patch = interpreter._patch_lang

    def once(fn):
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return patch(fn)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", once)
        yield


def guarded(
    shape: tuple[int, ...], dtype: torch.dtype, fill: float = float("nan")
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tensor, its whole allocation): the tensor lies between guards of `fill`, 4096 elements each."""
    count = int(torch.Size(shape).numel())
    whole = torch.full((count + 8192,), fill, dtype=dtype, device=DEVICE)
    return whole[4096 : 4096 + count].view(shape), whole


def guards_of(whole: torch.Tensor) -> torch.Tensor:
    return torch.cat([whole[:4096], whole[-4096:]])


class Paged:
    """A pool with the contexts of `lens`, in random blocks; everything else in it is NaN."""

    def __init__(self, lens, num_heads, num_kv_heads, head_dim, block_size, dtype, seed=0):
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-n // block_size) for n in lens]
        num_blocks = sum(counts) + 3
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        (self.k_cache, self.k_whole), (self.v_cache, self.v_whole) = (guarded(shape, dtype), guarded(shape, dtype))
        self.block_table, self.table_whole = guarded((len(lens), max(counts) + 1), torch.int32, FAR)
        order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
        slots, first = [], 0
        for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
            table = order[first : first + count]
            self.block_table[row, :count] = table.to(DEVICE)
            slots.append((table[:, None].long() * block_size + torch.arange(block_size)).flatten()[:length])
            first += count
        self.slots = torch.cat(slots).to(DEVICE)
        self.k, self.v = (
            torch.randn(sum(lens), num_kv_heads, head_dim, generator=generator).to(DEVICE, dtype) for _ in range(2)
        )
        reference.write_kv(self.k, self.v, self.k_cache, self.v_cache, self.slots)
        self.lens = list(lens)
        self.context_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        self.scale = head_dim**-0.5
        self.shape, self.dtype, self.generator = (num_heads, head_dim), dtype, generator

    def queries(self, count: int) -> torch.Tensor:
        """Strided as attention layers hand them over: [heads, tokens, dim] seen as [tokens, heads, dim]."""
        num_heads, head_dim = self.shape
        q = torch.randn(num_heads, count, head_dim, generator=self.generator).to(DEVICE, self.dtype)
        return q.transpose(0, 1)

    def cache64(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_cache.double(), self.v_cache.double()


def assert_close(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """Error of at most 3 times plain PyTorch's at the same precision (and rounding of one output to allow for luck)."""
    ours_error, plain_error = ((x.double() - exact).norm() / exact.norm() for x in (ours, plain))
    floor = torch.finfo(ours.dtype).eps / 4
    assert ours_error <= 3 * max(plain_error.item(), floor), f"{ours_error:.2e} against plain {plain_error:.2e}"


def check_decode(paged: Paged, plan=None, workspace=None) -> None:
    q = paged.queries(len(paged.lens))
    longest = max(paged.lens)
    arguments = (paged.block_table, paged.context_lens, paged.scale, longest)
    exact = reference.paged_decode_attention(q.double(), *paged.cache64(), *arguments)
    plain = reference.paged_decode_attention(q, paged.k_cache, paged.v_cache, *arguments)
    out, whole = guarded(tuple(q.shape), q.dtype)
    decode.paged_decode_attention(q, paged.k_cache, paged.v_cache, *arguments, out=out, workspace=workspace, plan=plan)
    assert_close(out, plain, exact)
    assert guards_of(whole).isnan().all(), "wrote outside of the output"


GROUPS = [(4, 4), (6, 2), (8, 1)] + ([(40, 40), (32, 8), (64, 2)] if GPU else [])
DIMS = [64, 80] + ([16, 96, 128, 256] if GPU else [128])
BLOCK_SIZES = [1, 16, 256] + ([2, 4, 8, 32, 64, 128] if GPU else [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_decode_equals_float64(block_size, dtype):
    for (num_heads, num_kv_heads), head_dim in zip(GROUPS, itertools.cycle(DIMS)):
        check_decode(Paged(LENS, num_heads, num_kv_heads, head_dim, block_size, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", DIMS)
def test_decode_of_every_head_size(head_dim, dtype):
    check_decode(Paged(LENS, 4, 2, head_dim, 16, dtype, seed=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_warps", [1, 2, 4])
def test_decode_merges_many_chunks(num_warps, dtype):
    """Contexts of one chunk, of several, and of more chunks than one pass of the merge takes; twice over one
    workspace."""
    tensor_cores = dtype != torch.float32
    plan = decode.DecodePlan(tensor_cores, tile=16 * num_warps, chunk=64, num_warps=num_warps, merge=2)
    workspace = torch.zeros(100, dtype=torch.int32, device=DEVICE)
    for seed in range(2):
        check_decode(Paged([1, 64, 65, 330], 4, 2, 64, 16, dtype, seed), plan, workspace)
        assert not workspace.any(), "the workspace must be left as zeros"


def test_decode_of_an_empty_context_is_zero():
    """Rows that pad a captured batch have no context; their table is never followed."""
    paged = Paged([5, 40], 4, 2, 64, 16, torch.float16)
    paged.context_lens[0] = 0
    paged.block_table[0] = FAR
    q = paged.queries(2)
    out = decode.paged_decode_attention(
        q, paged.k_cache, paged.v_cache, paged.block_table, paged.context_lens, paged.scale, 2000
    )
    assert (out[0] == 0).all() and out[1].isfinite().all() and (out[1] != 0).any()
    assert torch.equal(
        out[0],
        reference.paged_decode_attention(
            q, paged.k_cache, paged.v_cache, paged.block_table, paged.context_lens, paged.scale, 2000
        )[0],
    )


def test_decode_survives_scores_of_any_size():
    """The running maximum must carry scores that overflow exp, of both signs."""
    for factor in (300.0, -300.0):
        paged = Paged([90], 2, 2, 64, 16, torch.float32)
        paged.k_cache.mul_(factor)
        check_decode(paged)


@pytest.mark.parametrize(
    "batch, context, expected",
    [
        (1, 100, (256, 4)),
        (8, 64, (256, 4)),
        (8, 1024, (256, 2)),
        (8, 4096, (1024, 2)),
        (128, 256, (1024, 1)),
        (128, 4096, (1024, 4)),
    ],
)
def test_plans_split_small_batches_and_long_contexts(batch, context, expected):
    plan = decode.plan_decode(batch * 8, torch.float16, context, num_multiprocessors=132)
    assert (plan.chunk, plan.num_warps) == expected


def test_every_plan_is_one_that_the_kernels_take():
    for rows, context, dtype in itertools.product((1, 7, 64, 5000), (1, 300, 5000, 100_000), DTYPES):
        plan = decode.plan_decode(rows, dtype, context, 132)
        assert plan.chunk % plan.tile == 0 and plan.tile & (plan.tile - 1) == 0
        assert plan.chunk & (plan.chunk - 1) == 0


CHUNKS = [  # (context, queries): whole prompts, chunks after a prefix, single tokens, an empty chunk
    [(40, 40), (7, 1), (100, 70), (33, 0), (64, 64)],
    [(17, 17), (90, 3)],
] + ([[(1000, 1000), (700, 129), (2048, 64), (130, 130)], [(3000, 1500)]] if GPU else [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prefill_equals_float64(block_size, dtype):
    for chunks, (num_heads, num_kv_heads), head_dim in zip(CHUNKS, GROUPS[1:] + GROUPS, itertools.cycle(DIMS)):
        check_prefill(chunks, num_heads, num_kv_heads, head_dim, block_size, dtype)


@pytest.mark.skipif(not GPU, reason="every head size by every tile shape: a GPU's work")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_prefill_of_every_head_size(head_dim, dtype):
    for chunks in CHUNKS:
        check_prefill(chunks, 4, 2, head_dim, 16, dtype)


@pytest.mark.parametrize("before", [0, 2])
def test_prefill_of_more_sequences_than_a_program_looks_through_at_least(before):
    check_prefill([(3 + index % 2, 1 + index % 3) for index in range(67)], 2, 1, 64, 16, torch.float16, before)


def check_prefill(chunks, num_heads, num_kv_heads, head_dim, block_size, dtype, before=3, behind=2) -> None:
    """`before` and `behind` the chunks lie rows that are not theirs, of decoding sequences or of nobody."""
    contexts, counts = zip(*chunks, strict=True)
    paged = Paged(contexts, num_heads, num_kv_heads, head_dim, block_size, dtype)
    q, own = paged.queries(before + sum(counts) + behind), slice(before, before + sum(counts))
    cu_seqlens_q = torch.tensor([*itertools.accumulate(counts, initial=before)], dtype=torch.int32, device=DEVICE)
    arguments = (paged.block_table, paged.context_lens, cu_seqlens_q, paged.scale, max(counts))
    exact = reference.paged_prefill_attention(q.double(), *paged.cache64(), *arguments)
    plain = reference.paged_prefill_attention(q, paged.k_cache, paged.v_cache, *arguments)
    out, whole = guarded(tuple(q.shape), q.dtype)
    prefill.paged_prefill_attention(q, paged.k_cache, paged.v_cache, *arguments, out=out)
    assert_close(out[own], plain[own], exact[own])
    assert guards_of(whole).isnan().all(), "wrote outside of the output"
    assert out[:before].isnan().all() and out[own.stop :].isnan().all(), "wrote to rows of no chunk"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_equals_attention_written_out(dtype):
    """The references themselves, against softmax(QK^T)V in float64 over gathered rows."""
    paged = Paged([40, 9], 4, 2, 64, 4, dtype)
    q = paged.queries(12)  # 11 queries of the first context, 1 of the second
    cu_seqlens_q = torch.tensor([0, 11, 12], dtype=torch.int32, device=DEVICE)
    out = reference.paged_prefill_attention(
        q, paged.k_cache, paged.v_cache, paged.block_table, paged.context_lens, cu_seqlens_q, paged.scale, 11
    )
    k, v = (x.double().repeat_interleave(2, dim=1) for x in (paged.k, paged.v))
    for row in range(12):
        keys = slice(0, 30 + row) if row < 11 else slice(40, 49)
        weight = torch.softmax(torch.einsum("hd,thd->ht", q[row].double(), k[keys]) * paged.scale, dim=1)
        expected = torch.einsum("ht,thd->hd", weight, v[keys])
        assert torch.allclose(out[row].double(), expected, atol=16 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("implementation", [write, reference], ids=["triton", "reference"])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_write_fills_its_slots_and_nothing_else(implementation, block_size):
    paged = Paged([5, 300 if GPU else 30], 3, 3, 80, block_size, torch.bfloat16)
    before = paged.k_whole.clone()
    paged.k_whole.fill_(float("nan")), paged.v_whole.fill_(float("nan"))
    slots = paged.slots.clone()
    slots[3] = -1  # skipped
    strided = (paged.k.repeat_interleave(2, dim=1)[:, ::2], paged.v.transpose(0, 1).contiguous().transpose(0, 1))
    implementation.write_kv(*strided, paged.k_cache, paged.v_cache, slots)
    flat = before[4096:-4096].view(paged.k_cache.shape)
    flat[paged.slots[3] // block_size, paged.slots[3] % block_size] = float("nan")
    assert torch.equal(paged.k_whole.nan_to_num(9.0), before.nan_to_num(9.0))
    written = paged.v_cache[slots[slots >= 0] // block_size, slots[slots >= 0] % block_size]
    assert torch.equal(written, paged.v[slots >= 0])
    assert guards_of(paged.v_whole).isnan().all()
    assert paged.v_cache.isfinite().sum() == written.numel()


def pools(count, num_blocks, block_size, device, pin=False, head_dim=80) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    shape = (num_blocks, block_size, 2, head_dim)
    made = [torch.randn(shape, generator=generator).half().to(device) for _ in range(count)]
    return [pool.pin_memory() if pin else pool for pool in made]


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_copy_moves_whole_blocks_in_every_cache(block_size):
    caches = pools(4, 9, block_size, DEVICE)
    expected = [cache.clone() for cache in caches]
    pairs = torch.tensor([[0, 3], [8, 5], [1, 7], [1, 6]], device=DEVICE)
    blocks.copy_blocks(caches, pairs)
    reference.copy_blocks(expected, pairs)
    assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))
    assert torch.equal(caches[3][6], pools(4, 9, block_size, DEVICE)[3][1])
    blocks.copy_blocks(caches, pairs[:0])  # nothing to do is not an error


def test_blocks_of_odd_sizes_move_too():
    """A block of 2 x 3 half-precision numbers is no whole number of 16-byte words."""
    caches, cpu = pools(2, 5, 1, DEVICE, head_dim=3), pools(2, 5, 1, "cpu", pin=GPU, head_dim=3)
    blocks.copy_blocks(caches, torch.tensor([[0, 3]], device=DEVICE))
    blocks.swap_blocks(caches, cpu, torch.tensor([[3, 4]]))
    if GPU:
        torch.cuda.synchronize()
    fresh = pools(2, 5, 1, "cpu", head_dim=3)
    for cache, pool, was in zip(caches, cpu, fresh, strict=True):
        assert torch.equal(pool[4], was[0]) and torch.equal(pool[:4], was[:4])
        assert torch.equal(cache[3].cpu(), was[0]) and torch.equal(cache[4].cpu(), was[4])


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("block_size", [1, 16])
def test_swap_out_and_in_again(block_size, batched):
    gpu, cpu = pools(4, 9, block_size, DEVICE), pools(4, 12, block_size, "cpu", pin=GPU)
    original = [pool.clone() for pool in gpu]
    out = torch.tensor([[2, 11], [7, 0], [3, 4]])
    blocks.swap_blocks(gpu, cpu, out, batched)
    for pool in gpu:
        pool[out[:, 0].to(DEVICE)] = float("nan")
    blocks.swap_blocks(cpu, gpu, out.flip(1), batched)
    if GPU:
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(gpu, original, strict=True))
    assert torch.equal(cpu[1][11].to(DEVICE), original[1][2])


def test_public_functions_run_on_the_cache_s_device():
    paged = Paged([9, 20], 4, 2, 64, 16, torch.float32)
    kernels.write_kv(paged.k, paged.v, paged.k_cache, paged.v_cache, paged.slots)
    q = paged.queries(2)
    arguments = (paged.k_cache, paged.v_cache, paged.block_table, paged.context_lens)
    one = kernels.paged_decode_attention(q, *arguments, paged.scale, 20)
    cu_seqlens_q = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    two = kernels.paged_prefill_attention(q, *arguments, cu_seqlens_q, paged.scale, 1)
    assert torch.allclose(one, two, atol=1e-6)
    kernels.copy_blocks([paged.k_cache], torch.tensor([[0, 1]], device=DEVICE))
    kernels.swap_blocks([paged.k_cache], [paged.k_cache.cpu()], torch.tensor([[0, 1]]), batched=False)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"dtype": torch.float64}, ["float64", "float16, bfloat16, float32"]),
        ({"block_size": 24}, ["block size 24", "power of two"]),
        ({"block_size": 512}, ["512", "256"]),
        ({"head_dim": 320}, ["head size 320", "256"]),
        ({"num_kv_heads": 3}, ["4 query heads", "3 KV heads", "multiple"]),
    ],
)
def test_unsupported_caches_are_refused_in_one_line(change, words):
    good = {"dtype": torch.float16, "block_size": 16, "head_dim": 64, "num_heads": 4, "num_kv_heads": 2}
    kernels.check_cache(**good)
    with pytest.raises(UserError) as error:
        kernels.check_cache(**{**good, **change})
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_caches_of_unequal_strides_are_refused():
    k_cache, v_cache = torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 128)[..., ::2]
    with pytest.raises(UserError, match="strides"):
        kernels.write_kv(
            torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), k_cache, v_cache, torch.zeros(1, dtype=torch.int64)
        )


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_decode_in_a_cuda_graph_follows_new_lengths():
    paged = Paged([700, 30, 2000], 8, 2, 128, 16, torch.float16)
    q = paged.queries(3).contiguous()
    out = torch.empty_like(q)
    workspace = torch.zeros(24, dtype=torch.int32, device=DEVICE)

    def call() -> None:
        kernels.paged_decode_attention(
            q, paged.k_cache, paged.v_cache, paged.block_table, paged.context_lens, paged.scale, 4096, out, workspace
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lens in ([700, 30, 2000], [1, 17, 1025], [512, 30, 256]):
        paged.context_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        q.normal_()
        out.fill_(float("nan"))
        graph.replay()
        arguments = (paged.block_table, paged.context_lens, paged.scale, 4096)
        plain = reference.paged_decode_attention(q, paged.k_cache, paged.v_cache, *arguments)
        assert_close(out, plain, reference.paged_decode_attention(q.double(), *paged.cache64(), *arguments))


@pytest.mark.skipif(not GPU, reason="a pool of 2 ** 31 elements and more")
def test_offsets_beyond_31_bits():
    shape = ((1 << 31) // (16 * 40 * 128) + 40, 16, 40, 128)
    k_cache, v_cache = (torch.empty(shape, dtype=torch.float16, device=DEVICE) for _ in range(2))
    last = torch.arange(shape[0] - 4, shape[0], device=DEVICE)
    slots = (last[:, None] * 16 + torch.arange(16, device=DEVICE)).flatten()[:50]
    k, v = (torch.randn(50, 40, 128, dtype=torch.float16, device=DEVICE) for _ in range(2))
    kernels.write_kv(k, v, k_cache, v_cache, slots)
    kernels.copy_blocks([k_cache, v_cache], torch.stack([last, last - 8], dim=1))
    q = torch.randn(50, 40, 128, dtype=torch.float16, device=DEVICE)
    lens, starts = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([50], [0, 50]))
    for table in (last, last - 8):
        table = table.to(torch.int32)[None]
        out = kernels.paged_prefill_attention(q, k_cache, v_cache, table, lens, starts, 0.1, 50)
        expected = reference.paged_prefill_attention(q, k_cache, v_cache, table, lens, starts, 0.1, 50)
        assert torch.allclose(out, expected, atol=2e-3)
        last_row = kernels.paged_decode_attention(q[-1:], k_cache, v_cache, table, lens, 0.1, 50)
        assert torch.allclose(last_row, expected[-1:], atol=2e-3)
