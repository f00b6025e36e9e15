"""Decoding of one's own, from the three methods that vLLM makes its decoding algorithms of (§5.2): fork, append, free.

    with llm.decoding() as decoding:
        root = decoding.start("The capital of France is")  # or token ids
        decoding.step()                                     # one forward pass for all that is not yet computed
        other = root.fork()                                 # shares all blocks of root, and takes none
        best, second = root.logprobs.topk(2).indices.tolist()
        root.append(best), other.append(second)             # the second one to write copies the last block (Fig. 8)
        decoding.step()
        other.free()

Beam search by these methods is at the end of this file. Memory manager, store and forward pass are those of the engine;
what the scheduler does for `generate`, the caller does here: which sequences there are, and when they are computed."""

from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from repro.checks import whole
from repro.engine.memory import CacheOp, KVCacheManager, PagedKVCacheManager
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError
from repro.llm.attention import attach
from repro.llm.batch import Batch, Chunks
from repro.llm.executor import TorchExecutor, within_memory
from repro.llm.requests import Encoder, vocabulary_of
from repro.llm.state import RequestState


class TokenSequence:
    """A sequence of tokens with K/V in the pool, made by `Decoding.start` or `fork`. `len` counts its tokens."""

    def __init__(self, decoding: "Decoding", token_ids: np.ndarray) -> None:
        request = Request(-1, 0.0, len(token_ids), 1, SamplingParams(temperature=0))
        self._decoding, self._group = decoding, SequenceGroup(request)
        self._state = RequestState(request, token_ids).sequences[0]
        self._stored = 0  # tokens whose K/V is computed
        self._logprobs: Tensor | None = None

    def __len__(self) -> int:
        return self._group.request.prompt_tokens + len(self._state.tokens)

    @property
    def token_ids(self) -> list[int]:
        """All its tokens, those it started with and those appended. Also of a freed sequence."""
        return self._state.token_ids(0, len(self)).tolist()

    @property
    def logprobs(self) -> Tensor:
        """The model's log-probabilities of the next token, by the newest step that computed this sequence: float32
        [vocabulary], on the model's device. A fork begins with its parent's. UserError before the first step."""
        if self._logprobs is None:
            raise UserError("logprobs: nothing of this sequence is computed yet; call decoding.step() first")
        return self._logprobs

    @property
    def block_table(self) -> list[int]:
        """Physical blocks in logical order (§4.3). UserError for a freed sequence."""
        self._check("block_table")
        return list(self._decoding.manager.block_table(self._group.seqs[0]))

    def fork(self) -> "TokenSequence":
        """Another sequence with the same tokens (§5.2). It shares all blocks, so it takes neither memory nor a pass.

        UserError for a freed sequence, for one with tokens not yet computed, and beyond `max_num_seqs` sequences."""
        self._check("fork")
        if self._stored < len(self):
            raise UserError(
                f"fork: {len(self) - self._stored} of the sequence's {len(self)} tokens are not computed yet, and each "
                "fork would compute them again; call decoding.step() first"
            )
        child = TokenSequence(self._decoding, self._state.token_ids(0, len(self)))
        self._decoding._admit(child, "fork")
        self._decoding.manager.fork_sequence(self._group.seqs[0], child._group.seqs[0])
        child._stored, child._logprobs = self._stored, self._logprobs
        return child

    def append(self, token_id: int) -> None:
        """Add a token and take its slot (§5.2); the next step computes it.

        This takes a free block if the last one is full, or if other sequences share it: then it is copied (Fig. 8).
        UserError, and nothing changes, if none is free, for a token outside the vocabulary, beyond the model's length
        and for a freed sequence."""
        self._check("append")
        self._decoding._append(self, token_id)

    def free(self) -> None:
        """Give back its blocks; those that others share stay theirs (§5.2). UserError for a freed sequence."""
        self._check("free")
        self._decoding._free(self)

    def _check(self, what: str) -> None:
        self._decoding._check_open(what)
        if self not in self._decoding._live:
            raise UserError(f"{what}: this sequence has been freed; start another one, or fork one that is alive")


class Decoding:
    """What `LLM.decoding` gives: the whole pool of an LLM, for sequences that the caller starts, forks and frees.

    `manager` has the shape of the pool, and `most` is how many sequences there may be at once. UserError if the memory
    is not paged."""

    def __init__(self, executor: TorchExecutor, manager: KVCacheManager, most: int) -> None:
        if not manager.shares:
            raise UserError("decoding of one's own shares blocks and needs paged memory; use the system 'vllm'")
        # A plain one of the same shape: what else a system's manager does is for requests that a scheduler admits.
        self.manager = PagedKVCacheManager(manager.num_blocks, manager.block_size)
        self._loaded, self._store, self._runner = executor.loaded, executor.store, executor.runner
        self._most = most
        self._live: dict[TokenSequence, None] = {}  # in the order in which they began
        self._copies: list[CacheOp] = []  # of the next step
        self._is_open = True
        self._run = self._loaded.turns.begin()
        attach(self._loaded.model, self._store.caches)

    def __enter__(self) -> "Decoding":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in list(self._live):
            self._free(one)
        self._is_open = False

    @property
    def num_free_blocks(self) -> int:
        return self.manager.num_free_blocks

    @property
    def logical_blocks(self) -> int:
        """Blocks of all sequences; one that n of them share counts n times."""
        return sum(len(one.block_table) for one in self._live)

    @property
    def physical_blocks(self) -> int:
        """Blocks in use. What sharing saves is 1 - physical / logical (Fig. 15)."""
        return self.manager.num_blocks - self.num_free_blocks

    def start(self, prompt: str | list[int]) -> TokenSequence:
        """A new sequence: a text, or token ids. The next step computes it.

        UserError for what is neither, for no token or more than the model can take, if the pool has too few free blocks
        and beyond `max_num_seqs` sequences. Nothing changes then."""
        self._check_open("start")
        token_ids = Encoder(self._loaded).encode(prompt, "prompt")
        if not len(token_ids):
            raise UserError("start: the prompt has no token; give at least one")
        self._check_length("start: the prompt has", len(token_ids))
        one, needed, free = TokenSequence(self, token_ids), self.manager.cdiv(len(token_ids)), self.num_free_blocks
        if needed > free:
            raise UserError(f"start: the prompt takes {needed} blocks, {self._scarce(free)}")
        self._admit(one, "start")
        self.manager.allocate(one._group, len(token_ids))
        return one

    def step(self) -> dict[TokenSequence, Tensor]:
        """Compute, in one forward pass, the tokens of all sequences that are not yet: a prompt, or what was appended.

        Returns the new `logprobs` of those sequences. UserError if there are none, or if the GPU's memory does not
        suffice; the step may then be repeated."""
        self._check_open("step")
        self._loaded.turns.check(self._run)
        due = [one for one in self._live if one._stored < len(one)]
        if not due:
            raise UserError("step: all tokens are computed; append one to a sequence, or start a sequence, first")
        self._store.apply(self._copies)
        self._copies = []
        due.sort(key=lambda one: len(one) - one._stored > 1)  # single tokens first, as a batch has them
        logits = within_memory(lambda: self._forward(due), f"in a step of {len(due)} sequences")
        for one, logprobs in zip(due, logits.float().log_softmax(-1)):
            one._stored, one._logprobs = len(one), logprobs
        return {one: one._logprobs for one in due}

    def _forward(self, due: list[TokenSequence]) -> Tensor:
        """Logits of the token after each sequence, [sequences, vocabulary]; those with one new token come first."""
        rows, count = len(due), sum(len(one) - one._stored == 1 for one in due)
        tables = np.zeros((rows, self.manager.cdiv(self._loaded.config.max_model_len)), np.int32)
        for row, one in enumerate(due):
            tables[row, : len(one.block_table)] = one.block_table
        lengths, nothing = np.array([len(one) for one in due], np.int32), np.zeros(count, np.int32)
        chunks = self._chunks(due[count:], count, tables) if rows > count else None
        states, nowhere = [one._state for one in due], np.full(rows, -1)
        batch = Batch([], states, [], count, nowhere, lengths[:count], nothing, np.ones(rows, bool), tables, chunks, 1)
        newest = [one._state.token_ids(len(one) - 1, len(one))[0] for one in due]
        self._runner.load(batch, np.array(newest, np.int64))
        return self._runner.prefill(batch) if chunks else self._runner.decode(batch)

    def _chunks(self, due: list[TokenSequence], first: int, tables: np.ndarray) -> Chunks:
        """The new tokens of sequences that have several, in the rows from `first` on."""
        rows, size = first + np.arange(len(due)), self.manager.block_size
        spans = [(one._stored, len(one)) for one in due]
        ends = np.cumsum([0] + [stop - start for start, stop in spans])
        positions = np.concatenate([np.arange(*span) for span in spans])
        tokens = np.concatenate([one._state.token_ids(*span) for one, span in zip(due, spans)])
        blocks = tables[np.repeat(rows, np.diff(ends)), positions // size].astype(np.int64)
        lengths = np.array([stop for _, stop in spans], np.int32)
        slots = blocks * size + positions % size
        return Chunks(rows, lengths, ends.astype(np.int32), tokens, positions, slots, np.arange(len(due)))

    # What the methods of a sequence do to the pool

    def _admit(self, one: TokenSequence, what: str) -> None:
        if len(self._live) >= self._most:
            raise UserError(
                f"{what}: there are {len(self._live)} sequences, as many as max_num_seqs allows; free one, or make the "
                "LLM with a larger max_num_seqs"
            )
        self._live[one] = None

    def _append(self, one: TokenSequence, token_id: int) -> None:
        token_id = whole("append: token_id", token_id, 0, vocabulary_of(self._loaded) - 1)
        self._check_length("append: with it the sequence has", len(one) + 1)
        seq, is_full = one._group.seqs[0], len(one) % self.manager.block_size == 0
        is_shared = self.manager.gpu.ref_counts[self.manager.block_table(seq)[-1]] > 1
        if (is_full or is_shared) and not self.num_free_blocks:
            raise UserError(f"append: the token takes a block, {self._scarce(0)}")
        self._copies += self.manager.append_slots(one._group, len(one) + 1)
        one._state.tokens.append(token_id)

    def _free(self, one: TokenSequence) -> None:
        self.manager.free(one._group)
        del self._live[one]

    def _check_open(self, what: str) -> None:
        if not self._is_open:
            raise UserError(f"{what}: the block of `with llm.decoding()` has ended; open another one and start anew")

    def _check_length(self, what: str, count: int) -> None:
        limit, name = self._loaded.config.max_model_len, self._loaded.config.name
        if count > limit:
            raise UserError(f"{what} {count} tokens, more than the {limit} that {name} can take; use a shorter one")

    def _scarce(self, free: int) -> str:
        return f"and {free} of the pool's {self.manager.num_blocks} are free; free a sequence, or make a larger pool"


def beam_search(
    decoding: Decoding, prompt: str | list[int], width: int, max_tokens: int
) -> list[tuple[list[int], float]]:
    """The `width` best continuations of `max_tokens` tokens that a beam search finds, with their scores, best first.

    A score is the summed log-probability / max_tokens. The search is that of `SamplingParams(use_beam_search=True,
    ignore_eos=True)`: no stop token ends a beam early. UserError as the methods of a sequence; the beams are then kept
    until the block ends."""
    whole("width", width, 1, vocabulary_of(decoding._loaded))
    whole("max_tokens", max_tokens, 1)
    beams, scores = [decoding.start(prompt)], torch.zeros(1)
    start = len(beams[0])
    for length in range(1, max_tokens + 1):
        decoding.step()
        logprobs = torch.stack([beam.logprobs for beam in beams])
        scores, best = (scores.to(logprobs.device)[:, None] + logprobs).flatten().topk(width)
        parents, tokens = (best // logprobs.shape[1]).tolist(), (best % logprobs.shape[1]).tolist()
        if length == max_tokens:  # the last token's K/V is never needed
            break
        for place, beam in enumerate(beams):
            if place not in parents:
                beam.free()
        # The first child of a beam goes on with it, the others are forks; all are made before any of them writes.
        children = [
            beams[parent] if parent not in parents[:rank] else beams[parent].fork()
            for rank, parent in enumerate(parents)
        ]
        for beam, token in zip(children, tokens):
            beam.append(token)
        beams = children
    found = [beams[parent].token_ids[start:] + [token] for parent, token in zip(parents, tokens)]
    for beam in beams:
        beam.free()
    return list(zip(found, (scores / max_tokens).tolist()))
