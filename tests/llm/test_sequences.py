"""Fork, append and free: against transformers' own model, the engine's own decoding, and a recount of the blocks."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_executor import MAX_LEN, VOCABULARY, loaded, reference
from test_llm import out_of_memory
from tiny import llm, tokens

from repro.engine.memory import OpKind
from repro.errors import UserError
from repro.llm.model_runner import ModelRunner
from repro.llm.pool import PoolSize
from repro.llm.sequences import beam_search
from repro.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = (5, 6, 7, 8, 9, 10)


def engine(name: str = "qwen2", num_blocks: int = 60, **options):
    """Blocks of 4, with NaN in every slot: reading one that was not written shows."""
    made = llm(loaded(name), pool=PoolSize(num_blocks=num_blocks), **options)
    for cache in made.executor.store.caches:
        cache.fill_(float("nan"))
    return made


@functools.cache
def expected(name: str, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of the token after these, by transformers' own model."""
    with torch.no_grad():
        return reference(name)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)


def assert_right(name: str, one) -> None:
    torch.testing.assert_close(one.logprobs, expected(name, tuple(one.token_ids)), atol=2e-4, rtol=1e-4)


def greedy(made, ids: list[int], count: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return tokens(made, [ids], params)[0][0]


def go_on(decoding, sequences, count: int) -> None:
    """Append the best token to each, and compute it, `count` times."""
    for _ in range(count):
        for one in sequences:
            one.append(int(one.logprobs.argmax()))
        decoding.step()


@pytest.mark.parametrize("name", ["opt", "llama", "qwen2"])
def test_each_fork_goes_on_as_if_it_were_alone(name):
    made = engine(name)
    with made.decoding() as decoding:
        root = decoding.start(list(PROMPT))
        assert list(decoding.step()) == [root]
        forks = [root, root.fork(), root.fork()]
        late = decoding.start([1, 2, 3])
        for one, token in zip(forks, (11, 12, 13)):
            one.append(token)
        computed = decoding.step()  # single tokens and a prompt in one pass
        assert set(computed) == {*forks, late} and all(computed[one] is one.logprobs for one in computed)
        go_on(decoding, forks[1:], 3)
        forks.append(forks[1].fork())  # of a fork
        forks[3].append(40), forks[3].append(41)  # two tokens at once
        go_on(decoding, [forks[0], forks[2], late], 7)
        assert forks[3].logprobs.dtype is torch.float32 and forks[3].logprobs.shape == (VOCABULARY,)
        for one in (*forks, late):
            assert_right(name, one)
        texts = [one.token_ids for one in forks]
    assert texts[3] == [*texts[1], 40, 41]
    for token, ids in zip((11, 12, 13), texts):
        assert ids == [*PROMPT, token, *greedy(made, [*PROMPT, token], len(ids) - 7)]


def test_a_block_is_copied_exactly_when_others_hold_what_is_written():
    made = engine()
    moved = made.executor.store.blocks_moved
    with made.decoding() as decoding:
        root = decoding.start([*PROMPT, 11, 12])  # two full blocks
        decoding.step()
        other = root.fork()
        assert root.block_table == other.block_table and decoding.num_free_blocks == 58
        assert (decoding.logical_blocks, decoding.physical_blocks) == (4, 2)
        root.append(1), other.append(2)  # a new block each: nothing to copy
        decoding.step()
        assert moved[OpKind.COPY] == 0 and (decoding.logical_blocks, decoding.physical_blocks) == (6, 4)

        third, fourth = other.fork(), other.fork()
        shared = other.block_table[-1]
        third.append(3), other.append(4), other.append(5)
        fourth.append(6)  # the last holder writes in place
        assert fourth.block_table[-1] == shared != third.block_table[-1] != other.block_table[-1] != shared
        decoding.step()
        assert moved[OpKind.COPY] == 2

        fifth = other.fork()
        other.free()
        fifth.append(7)  # alone again
        decoding.step()
        assert moved[OpKind.COPY] == 2
        for one in (root, third, fourth, fifth):
            assert_right("qwen2", one)


@pytest.mark.parametrize("width, count", [(2, 1), (3, 12), (5, 9)])
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_beam_search_by_fork_append_and_free_is_the_engines(name, width, count):
    made = engine(name)
    params = SamplingParams(n=width, use_beam_search=True, max_tokens=count, ignore_eos=True)
    samples = made.generate([list(PROMPT)], params, progress=False)[0].samples
    with made.decoding() as decoding:
        usage = []
        step = decoding.step
        decoding.step = lambda: (usage.append((decoding.physical_blocks, decoding.logical_blocks)), step())
        found = beam_search(decoding, list(PROMPT), width, count)
        assert decoding.num_free_blocks == 60
    assert [ids for ids, _ in found] == [one.token_ids for one in samples]
    assert [score for _, score in found] == pytest.approx([one.score for one in samples], rel=1e-5)
    assert len(usage) == count and all(physical < logical for physical, logical in usage[1:])


def test_a_text_is_encoded_as_generate_encodes_it(spoken):
    made = llm(spoken)
    result = made.generate("hello", SamplingParams(temperature=0, max_tokens=5), progress=False)[0]
    with made.decoding() as decoding:
        one = decoding.start("hello")
        assert one.token_ids == result.prompt_token_ids
        decoding.step()
        go_on(decoding, [one], 5)
    assert one.token_ids[-5:] == result.token_ids[0]


# What cannot be


def test_without_a_free_block_nothing_is_lost():
    made = engine(num_blocks=3)
    with made.decoding() as decoding:
        root, small = decoding.start(list(PROMPT)), decoding.start([1])
        decoding.step()
        forks = [root.fork(), root.fork()]
        for one in (root, forks[0]):
            before = one.block_table
            with pytest.raises(
                UserError, match="append: the token takes a block, and 0 of the pool's 3 are free; free"
            ):
                one.append(11)
            assert one.block_table == before and one.token_ids == list(PROMPT)
        with pytest.raises(UserError, match="the prompt takes 2 blocks, and 0 of the pool's 3 are free"):
            decoding.start([1] * 5)
        with pytest.raises(UserError, match="step: all tokens are computed"):
            decoding.step()
        small.append(2)
        small.free()
        forks[0].append(11), root.free(), forks[1].append(12)
        decoding.step()
        for one in forks:
            assert_right("qwen2", one)


@pytest.mark.parametrize(
    "message, action",
    [
        ("append: token_id = 101 must be a whole number from 0 to 100", lambda d, one: one.append(VOCABULARY)),
        ("append: token_id = True must be a whole number", lambda d, one: one.append(True)),
        ("append: this sequence has been freed; start another", lambda d, one: (one.free(), one.append(1))),
        ("free: this sequence has been freed", lambda d, one: (one.free(), one.free())),
        ("fork: this sequence has been freed", lambda d, one: (one.free(), one.fork())),
        ("block_table: this sequence has been freed", lambda d, one: (one.free(), one.block_table)),
        ("fork: 2 of the sequence's 8 tokens are not", lambda d, one: (one.append(1), one.append(2), one.fork())),
        ("logprobs: nothing of this sequence is computed yet", lambda d, one: d.start([1]).logprobs),
        ("65 tokens, more than the 64 that qwen2", lambda d, one: [one.append(1) for _ in range(60)]),
        ("start: the prompt has 65 tokens, more than the 64", lambda d, one: d.start([1] * 65)),
        ("start: the prompt has no token", lambda d, one: d.start([])),
        ("prompt: qwen2 has no tokenizer", lambda d, one: d.start("text")),
        ("prompt: token ids must be from 0 to 100, not 101", lambda d, one: d.start([101])),
        ("fork: there are 5 sequences, as many as max_num_seqs", lambda d, one: [one.fork() for _ in range(5)]),
        ("start: there are 5 sequences", lambda d, one: [d.start([1]) for _ in range(5)]),
        ("width = 0 must be a whole number from 1 to 101", lambda d, one: beam_search(d, [1], 0, 3)),
        ("max_tokens = 0 must be", lambda d, one: beam_search(d, [1], 2, 0)),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_the_sequences_stay_usable(message, action):
    made = engine(max_num_seqs=5)
    with made.decoding() as decoding:
        root = decoding.start(list(PROMPT))
        decoding.step()
        other = root.fork()
        with pytest.raises(UserError, match=message):
            action(decoding, root)
        other.append(3)
        decoding.step()
        assert_right("qwen2", other)


def test_after_its_block_nothing_works_and_the_model_generates_as_before():
    made = engine()
    before = greedy(made, list(PROMPT), 8)
    with pytest.raises(ZeroDivisionError), made.decoding() as decoding:
        root = decoding.start(list(PROMPT))
        decoding.step()
        with pytest.raises(UserError, match=r"in a block of llm.decoding\(\)"):
            greedy(made, list(PROMPT), 8)
        with pytest.raises(UserError, match=r"in a block of llm.decoding\(\)"), made.decoding():
            pass
        root.fork().append(3)
        1 / 0  # noqa: B018
    assert decoding.num_free_blocks == 60 and root.token_ids == list(PROMPT)
    assert greedy(made, list(PROMPT), 8) == before
    for action in (root.fork, root.free, decoding.step, lambda: root.append(1), lambda: decoding.start([1])):
        with pytest.raises(UserError, match=r"the block of `with llm.decoding\(\)` has ended"):
            action()


def test_another_thread_waits_for_the_block_to_end():
    made = engine()
    expected_tokens, found = greedy(made, list(PROMPT), 8), []
    thread = threading.Thread(target=lambda: found.append(greedy(made, list(PROMPT), 8)))
    with made.decoding() as decoding:
        thread.start()
        root = decoding.start([1, 2, 3])
        decoding.step()
        go_on(decoding, [root], 20)
        assert found == []
        assert_right("qwen2", root)
    thread.join()
    assert found == [expected_tokens]


def test_contiguous_memory_is_refused():
    with (
        pytest.raises(UserError, match="needs paged memory; use the system 'vllm'"),
        engine(system="orca-max").decoding(),
    ):
        pass


def test_a_step_that_runs_out_of_memory_can_be_repeated(monkeypatch):
    made = engine()
    with made.decoding() as decoding:
        root = decoding.start(list(PROMPT))
        decoding.step()
        other = root.fork()
        root.append(1), other.append(2)
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "decode", out_of_memory)
            with pytest.raises(UserError, match="out of GPU memory in a step of 2 sequences"):
                decoding.step()
        decoding.step()
        for one in (root, other):
            assert_right("qwen2", one)


# Any order of calls

which = st.integers(0, 2**16)
ids = st.integers(0, VOCABULARY - 1)


@functools.cache
def scarce():
    return engine(num_blocks=10, max_num_seqs=6)


class DecodingMachine(RuleBasedStateMachine):
    """Sequences begin, fork, grow, are computed and freed in any order, in a pool that is soon full."""

    @initialize()
    def begin(self) -> None:
        self.stack = contextlib.ExitStack()
        for cache in scarce().executor.store.caches:
            cache.fill_(float("nan"))
        self.decoding = self.stack.enter_context(scarce().decoding())
        self.tokens: dict = {}
        self.num_computed: dict = {}

    def one(self, index: int):
        return list(self.tokens)[index % len(self.tokens)]

    @rule(prompt=st.lists(ids, min_size=1, max_size=12))
    def start(self, prompt: list[int]) -> None:
        if len(self.tokens) == 6 or -(-len(prompt) // 4) > self.decoding.num_free_blocks:
            with pytest.raises(UserError, match="start: "):
                self.decoding.start(prompt)
        else:
            one = self.decoding.start(prompt)
            self.tokens[one], self.num_computed[one] = list(prompt), 0

    @precondition(lambda self: self.tokens)
    @rule(index=which)
    def fork(self, index: int) -> None:
        one, free = self.one(index), self.decoding.num_free_blocks
        if len(self.tokens) == 6 or self.num_computed[one] < len(self.tokens[one]):
            with pytest.raises(UserError, match="fork: "):
                one.fork()
        else:
            child = one.fork()
            assert child.block_table == one.block_table and child.logprobs is one.logprobs
            self.tokens[child], self.num_computed[child] = list(self.tokens[one]), self.num_computed[one]
        assert self.decoding.num_free_blocks == free

    @precondition(lambda self: self.tokens)
    @rule(index=which, more=st.lists(ids, min_size=1, max_size=5))
    def append(self, index: int, more: list[int]) -> None:
        one = self.one(index)
        for token in more:
            free, last = self.decoding.num_free_blocks, one.block_table[-1]
            others = sum(last in other.block_table for other in self.tokens) - 1
            takes = len(self.tokens[one]) % 4 == 0 or others > 0
            if len(self.tokens[one]) == MAX_LEN or (takes and not free):
                with pytest.raises(UserError, match="append: "):
                    one.append(token)
                return
            one.append(token)
            self.tokens[one].append(token)
            assert free - self.decoding.num_free_blocks == takes

    @precondition(lambda self: any(self.num_computed[one] < len(self.tokens[one]) for one in self.tokens))
    @rule()
    def step(self) -> None:
        due = [one for one in self.tokens if self.num_computed[one] < len(self.tokens[one])]
        assert set(self.decoding.step()) == set(due)
        self.num_computed = {one: len(self.tokens[one]) for one in self.tokens}
        for one in due:
            assert_right("qwen2", one)

    @precondition(lambda self: self.tokens)
    @rule(index=which)
    def free(self, index: int) -> None:
        one = self.one(index)
        one.free()
        del self.tokens[one], self.num_computed[one]

    @invariant()
    def no_block_is_lost_and_none_is_written_by_two(self) -> None:
        if not hasattr(self, "tokens"):
            return
        held = Counter(block for one in self.tokens for block in one.block_table)
        manager = self.decoding.manager
        assert manager.gpu.ref_counts == [held[block] for block in range(10)]
        assert (self.decoding.physical_blocks, self.decoding.logical_blocks) == (len(held), sum(held.values()))
        assert len(held) + self.decoding.num_free_blocks == 10
        for one, known in self.tokens.items():
            assert one.token_ids == known and len(one) == len(known) and len(one.block_table) == -(-len(known) // 4)
            if self.num_computed[one] < len(known):  # its next step writes from there on
                assert all(held[block] == 1 for block in one.block_table[self.num_computed[one] // 4 :])

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()
            assert self.decoding.num_free_blocks == 10


def test_any_sequence_of_calls():
    before = greedy(scarce(), list(PROMPT), 8)
    case = DecodingMachine.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=40)
    case("runTest").runTest()
    assert greedy(scarce(), list(PROMPT), 8) == before
