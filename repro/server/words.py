"""What stands for a tokenizer where there is no model: pieces of text as numbers, and numbers as words.

Equal texts have equal tokens, and texts that begin alike have tokens that begin alike, so a prefix cache finds what it
would find with a real tokenizer. There are about as many tokens as a real one makes."""

import re
import zlib

from repro.checks import instance, shown
from repro.errors import UserError

_LIST = """
a all also and any as at be been but by can day do even find first for from get give go good have he her here him how
if in into it just know like look make many me more most new no not now of on one only or other our out over people
said see she so some take than that the their them then there these they thing think this time to two up us use very
want water way we well what when which who will with word work world would year you"""
WORDS = _LIST.split()
EOS = len(WORDS)  # ends an output; it has no text
VOCABULARY = 32_000
_PIECE = re.compile(r" ?[^\W_]{1,7}|\s|[\W_]")
_IDS = {word: place for place, word in enumerate(WORDS)}


def encode(text: str) -> list[int]:
    """Token ids of a text. A word of the list has its place; any other piece has a number from its letters."""
    return [_id(piece) for piece in _PIECE.findall(text)]


def _id(piece: str) -> int:
    known = _IDS.get(piece.removeprefix(" "))
    return EOS + 1 + zlib.crc32(piece.encode()) % (VOCABULARY - EOS - 1) if known is None else known


def text_of(token_id: int) -> str:
    """A token as text, as it stands within an output."""
    if token_id < EOS:
        return f" {WORDS[token_id]}"
    return "" if token_id == EOS else f" <{token_id}>"


def checked_ids(given: object, name: str) -> list[int]:
    """A list of token ids as it is. UserError for anything else."""
    for one in instance(name, given, list, "a text or a list of token ids"):
        if type(one) is not int or not 0 <= one < VOCABULARY:
            raise UserError(f"{name}: a token id must be a whole number from 0 to {VOCABULARY - 1}, not {shown(one)}")
    return given
