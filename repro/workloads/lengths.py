"""Request lengths from somewhere: what every source must offer, and pairs that a user brings in a file.

A source hands out (prompt, output) lengths in tokens and says what it is. `LengthPairs` is a finite table of pairs,
from a CSV file (here) or from a data set (`repro.workloads.hub`); the embedded distributions are in
`repro.workloads.fig11`. This module knows nothing of arrival times, tokenizers or the contents of any request."""

import csv
import functools
import hashlib
import io
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from repro.errors import UserError

ARRIVALS_STREAM, LENGTHS_STREAM = 0, 1  # independent random streams of one trace seed
COLUMNS = ("prompt_tokens", "output_tokens")

# sha256 of the pairs (`pairs_hash`) that the paper's ShareGPT trace was drawn from: those of the authors' artifact
# (sosp-ae-39/sosp-ae-astra) with prompt + output <= 2048; 79,731 pairs with Fig. 11's means, 161.31 / 337.99.
PAPER_PAIRS = {"sharegpt": "e4837cf1c5bd9975b1868e1dbcbaf49a7bf6871a1ab66c769fd282a0b83e1c0f"}

# sha256 of the pairs that their generator shuffles, prompt + output < 2048 (79,725), in their file's order
PAPER_ORDER = {"sharegpt": "626e362ea8cc8943aa6cc434fca98690fdebc1ead5513b7b8e1fad48a8e936d6"}


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """What a trace's card says of the lengths' source. Lengths are in tokens; `num_pairs` (None for a distribution) and
    the means are those after the filter; `dropped_share` is what the filter took, 0 to 1."""

    source: str
    recipe: str  # how a trace's requests are taken from the source
    filter: str
    num_pairs: int | None = None
    dropped_share: float = 0.0
    mean_prompt_tokens: float
    mean_output_tokens: float
    equals_paper_trace: bool = False


class LengthSource(Protocol):
    """Anything that lengths can be drawn from."""

    @property
    def facts(self) -> SourceFacts: ...

    def draw(self, num_pairs: int, seed: int) -> np.ndarray:
        """[num_pairs, 2] int64 (prompt, output) tokens, a function of the arguments only."""
        ...


def pairs_hash(pairs: np.ndarray) -> str:
    """sha256 of [n, 2] pairs as little-endian int64, sorted by prompt, then output: order does not count."""
    return _sha256(pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))])


def _sha256(pairs: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(pairs, dtype="<i8").tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class LengthPairs:
    """A table of (prompt, output) lengths, [n, 2] int64, in the source's order, all within the filter."""

    pairs: np.ndarray
    facts: SourceFacts

    @classmethod
    def filtered(cls, pairs: np.ndarray, source: str, workload: str, max_model_len: int) -> "LengthPairs":
        """The pairs with prompt + output <= max_model_len; UserError when none is left."""
        kept = np.array(pairs[pairs.sum(axis=1) <= max_model_len], dtype=np.int64)
        if len(kept) == 0:
            raise UserError(
                f"{source}: none of its {len(pairs)} pairs has prompt + output <= {max_model_len} tokens; raise "
                "max_model_len or bring shorter requests"
            )
        kept.setflags(write=False)
        facts = SourceFacts(
            source=source,
            recipe="the first N pairs in their order, N being the trace's requests, then a seeded shuffle, "
            "as the authors did; a trace of more requests than pairs takes all of them again, from the first",
            filter=f"prompt + output <= {max_model_len} ({len(kept)} of {len(pairs)} pairs kept)",
            num_pairs=len(kept),
            dropped_share=1.0 - len(kept) / len(pairs),
            mean_prompt_tokens=float(kept[:, 0].mean()),
            mean_output_tokens=float(kept[:, 1].mean()),
            equals_paper_trace=pairs_hash(kept) == PAPER_PAIRS.get(workload),
        )
        return cls(kept, facts)

    def draw(self, num_pairs: int, seed: int) -> np.ndarray:
        """[num_pairs, 2]: the first `num_pairs` pairs (beyond the last one again from the first), shuffled by the seed.

        A short trace is the beginning of the table, whatever stands there, as it was for the authors."""
        rng = np.random.default_rng([seed, LENGTHS_STREAM])
        return self.pairs[rng.permutation(np.arange(num_pairs) % len(self.pairs))]


@dataclass(frozen=True, eq=False)
class AuthorsPairs:
    """Pairs as the authors' generator draws them: in the file's order, shuffled by Python's own generator."""

    pairs: list[tuple[int, int]]
    facts: SourceFacts

    @classmethod
    def of(cls, source: LengthSource, workload: str, max_model_len: int) -> "AuthorsPairs":
        """Of a table of pairs those with prompt + output < max_model_len. `equals_paper_trace` is decided by content
        and order here. UserError for lengths that are no table, and when no pair is left."""
        if not isinstance(source, LengthPairs):
            raise UserError(
                "arrivals = 'authors' draws from a file of pairs in its order, and no file is given; name one with "
                "lengths (--lengths FILE.csv)"
            )
        kept = source.pairs[source.pairs.sum(axis=1) < max_model_len]
        if len(kept) == 0:
            raise UserError(
                f"{source.facts.source}: none of its pairs has prompt + output < {max_model_len} tokens, which is what "
                "the authors' generator keeps; raise max_model_len or bring shorter requests"
            )
        facts = replace(
            source.facts,
            recipe="the pairs in their order, repeated as often as needed and cut to the number of arrivals, then "
            "Python's shuffle with the seed: the authors' generator",
            filter=f"prompt + output < {max_model_len} ({len(kept)} pairs kept)",
            num_pairs=len(kept),
            mean_prompt_tokens=float(kept[:, 0].mean()),
            mean_output_tokens=float(kept[:, 1].mean()),
            equals_paper_trace=_sha256(kept) == PAPER_ORDER.get(workload),
        )
        return cls(list(map(tuple, kept.tolist())), facts)

    def draw(self, num_pairs: int, seed: int) -> np.ndarray:
        """[num_pairs, 2], bit for bit as the authors' script draws them."""
        drawn = (self.pairs * -(-num_pairs // len(self.pairs)))[:num_pairs]
        random.Random(seed).shuffle(drawn)
        return np.array(drawn, dtype=np.int64).reshape(num_pairs, 2)


def lengths_from_csv(path: str | Path, workload: str = "sharegpt", max_model_len: int = 2048) -> LengthPairs:
    """Length pairs from a CSV file with a header that names prompt_tokens and output_tokens (others are ignored).

    `workload` only decides which of the paper's traces the pairs are compared with. Every malformed line is a UserError
    with its line number. An unchanged file is read once per process."""
    path = Path(path)
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UserError(f"cannot read the lengths file {str(path)!r}: {error}") from error
    return _load_csv(path, status.st_mtime_ns, status.st_size, workload, max_model_len)


@functools.lru_cache(maxsize=8)
def _load_csv(path: Path, modified_ns: int, size: int, workload: str, max_model_len: int) -> LengthPairs:
    def fail(line: int, what: str) -> UserError:
        return UserError(
            f"{path}, line {line}: {what}. The file is a header 'prompt_tokens,output_tokens' and then one request a "
            "line, two whole numbers of at least 1"
        )

    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the lengths file {str(path)!r}: {error.strerror or error}") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise fail(raw.count(b"\n", 0, error.start) + 1, "not UTF-8 text") from error

    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        if any(header.count(name) != 1 for name in COLUMNS):
            raise fail(1, f"the header must name {' and '.join(COLUMNS)} once each, it is {','.join(header)[:80]!r}")
        columns = [header.index(name) for name in COLUMNS]
        pairs = []
        for row in rows:
            if not row:  # a blank line
                continue
            if len(row) != len(header):
                raise fail(rows.line_num, f"{len(row)} values where the header has {len(header)}")
            for name, cell in zip(COLUMNS, values := [row[column].strip() for column in columns]):
                # isascii: int() also takes digits of other scripts. 9 digits are beyond any context length.
                if not (cell.isascii() and cell.isdigit() and len(cell) <= 9 and int(cell) >= 1):
                    raise fail(rows.line_num, f"{name} is {cell[:40]!r}")
            pairs.append((int(values[0]), int(values[1])))
    except csv.Error as error:
        raise fail(rows.line_num, f"not CSV ({error})") from error
    if not pairs:
        raise fail(max(1, rows.line_num), "no request in the file")
    return LengthPairs.filtered(np.array(pairs, dtype=np.int64), path.name, workload, max_model_len)
