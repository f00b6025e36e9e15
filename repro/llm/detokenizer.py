"""From tokens to text, token by token: what can be said for certain, and where a stop text ends it.

A text is not the sum of its tokens' texts. A character may span several tokens, a tokenizer drops the space before the
first word, and a run of byte tokens is decoded as a whole. So a short window of the newest tokens is decoded, and the
text of those that later tokens can still change is held back. No step looks at the whole output."""

import re
from collections.abc import Iterable
from typing import Any

from repro.feed.stop_texts import begun_in, found_in

#: what a tokenizer writes for bytes that are no character, or not yet
UNKNOWN = "\ufffd"
_BYTES = 4  # of a character at most: as many tokens can share one
_BEFORE = 8  # tokens that a window keeps before those that can still change
_BYTE_TOKEN = re.compile("<0x[0-9a-fA-F]{2}>")


class Detokenizer:
    """The text of one output as its tokens come: `add` each, `finish` at the end.

    All that they return, joined, is `tokenizer.decode(token_ids, skip_special_tokens=True)` up to the first stop text.
    A stop text counts if token number `min_tokens` or a later one completes it; of several that one token completes,
    the one that begins first. `stop_text` is then that text, and `text_end` the length of the text before it, in
    characters; both are None until then.

    The cost of a token grows with the longest stop text, not with the output. Two exceptions: a run of byte tokens of a
    tokenizer that falls back to bytes is decoded, and held back, as a whole, because one wrong byte spoils all of it;
    and a tokenizer that takes spaces out again (`clean_up_tokenization_spaces`) leaves nothing certain before the
    end."""

    stop_text: str | None = None
    text_end: int | None = None

    def __init__(self, tokenizer: Any, stop_texts: Iterable[str] = (), min_tokens: int = 0) -> None:
        self._tokenizer, self._stops, self._min_tokens = tokenizer, tuple(stop_texts), min_tokens
        self._reach = max(map(len, self._stops), default=1) - 1  # of a stop text, before its last character
        self._falls_back, self._cleans_up = _falls_back(tokenizer), _cleans_up(tokenizer)
        self._num_tokens = 0
        # The newest tokens, their text, how much of it is certain, and how many of them are a run of bytes.
        self._window: list[int] = []
        self._window_text, self._window_certain, self._run = "", 0, 0
        # The end of the certain text, where it starts in the output, what may still change; what is said and searched.
        self._text, self._start, self._rest = "", 0, ""
        self._said = self._searched = 0

    def add(self, token_id: int) -> str:
        """The text that is certain now and was not before, possibly none. None either after a stop text."""
        if self.stop_text is not None:
            return ""
        self._num_tokens += 1
        self._read(token_id)
        if self._stops and self._num_tokens >= self._min_tokens and self._search():
            return self._say(self.text_end)
        # The beginning of a character, not yet the character, is searched again.
        self._searched = self._start + len(self._text) + len(self._rest.rstrip(UNKNOWN))
        said = self._say(self._start + len(self._text) - begun_in(self._text, self._stops))
        drop = max(0, len(self._text) - self._reach)  # no stop text that ends in new text begins there
        self._text, self._start = self._text[drop:], self._start + drop
        return said

    def finish(self) -> str:
        """The rest of the text, if no stop text has ended it: as the tokenizer decodes it, whole or not."""
        return "" if self.stop_text is not None else self._say(self._start + len(self._text) + len(self._rest))

    def _say(self, end: int) -> str:
        """The text up to character `end` of the output that is not said yet."""
        said = (self._text + self._rest)[self._said - self._start : end - self._start]
        self._said = end
        return said

    def _search(self) -> bool:
        """Whether a stop text is complete since the last token; notes which and where."""
        found = found_in(self._text + self._rest, self._stops, self._searched - self._start)
        if found is not None:
            place, self.stop_text = found
            self.text_end = self._start + place
        return found is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _read(self, token_id: int) -> None:
        """Take in one token: moves what has become certain into `_text`, and leaves in `_rest` what may change."""
        window = [*self._window, token_id]
        text = self._decode(window)
        if text == self._window_text and not self._decode([token_id] * 2):
            return  # a special token, which would take a place in the window and add nothing
        is_byte = self._falls_back and _BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id))
        self._run = self._run + 1 if is_byte else 0
        held = self._held(window, text)
        # A character begun before the tokens that are held back is one already, whatever it turns out to be.
        certain = max(self._window_certain, len(self._decode(window[:-held]))) if held else len(text)
        self._text, self._rest = self._text + text[self._window_certain : certain], text[certain:]
        if len(window) > 2 * (held + _BEFORE):
            window = window[-held - _BEFORE :]
            text = self._decode(window)  # which may begin otherwise, and ends as it did
            certain = len(text) - len(self._rest)
        self._window, self._window_text, self._window_certain = window, text, certain

    def _held(self, window: list[int], text: str) -> int:
        """How many of the newest tokens have a text that later ones can change."""
        if self._cleans_up:
            return len(window)
        if self._falls_back:
            return self._run
        return _BYTES if text.endswith(UNKNOWN) else 0


def _falls_back(tokenizer: Any) -> bool:
    """Whether it writes characters that it does not know as byte tokens, such as <0xC3> <0xA9> for é."""
    ids = [tokenizer.convert_tokens_to_ids(name) for name in ("<0xC3>", "<0xA9>")]
    return None not in ids and tokenizer.decode(ids) == "é"


def _cleans_up(tokenizer: Any) -> bool:
    """Whether it takes the space before a full stop out again. Not all that are set to do so do it."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    return " ." not in tokenizer.decode(tokenizer("a .", add_special_tokens=False)["input_ids"])
