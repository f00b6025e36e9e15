"""Workloads: request traces from the paper's length distributions, a file of lengths, or the real data sets.

`make_trace` is the front door. The default needs no file and no network; `lengths` chooses another source. Importing
this package loads numpy only."""

import os

from repro.checks import instance, lookup, user_facing, whole
from repro.workloads.fig11 import EMBEDDED, fig11_lengths
from repro.workloads.hub import OPT_TOKENIZER, is_dataset_file, lengths_from_dataset
from repro.workloads.lengths import AuthorsPairs, LengthPairs, LengthSource, lengths_from_csv
from repro.workloads.trace import ARRIVALS, Trace, build_trace, check_arrivals, poisson_arrivals

WORKLOADS = EMBEDDED

__all__ = [
    "WORKLOADS",
    "AuthorsPairs",
    "LengthPairs",
    "Trace",
    "build_trace",
    "check_arrivals",
    "fig11_lengths",
    "length_source",
    "lengths_from_csv",
    "lengths_from_dataset",
    "make_trace",
    "poisson_arrivals",
]


@user_facing
def make_trace(
    workload: str,
    rate: float,
    duration_s: float,
    seed: int,
    lengths: str | os.PathLike[str] | None = None,
    max_model_len: int = 2048,
    tokenizer: str | os.PathLike[str] = OPT_TOKENIZER,
    arrivals: str = "poisson",
) -> Trace:
    """The trace of one experiment: Poisson arrivals at `rate` requests/s for `duration_s` s (section 6.1).

    `lengths` is None (embedded, from Fig. 11), a CSV file of length pairs, a data set's own .json, .jsonl or .parquet
    file, or "hub" for the data set on the Hugging Face hub; the last two count tokens with `tokenizer`, a hub id or a
    folder. Pairs with prompt + output > max_model_len are left out.

    Equal arguments give equal traces. Arrivals of one seed at two rates are one pattern on two time scales. Embedded
    lengths go with them: the same requests in the same order, more of them at the higher rate. A file's or data set's
    first N pairs are shuffled anew for every N (`LengthPairs.draw`).

    `arrivals` "authors" makes the authors' own trace, bit for bit if `lengths` has their pairs (docs/workloads.md). Its
    pairs have prompt + output < max_model_len.

    Raises UserError for an unknown workload, numbers that cannot be, or a source that cannot be read."""
    lookup("workload", dict.fromkeys(WORKLOADS), workload)
    whole("max_model_len", max_model_len, 2)
    lookup("arrivals", ARRIVALS, arrivals)
    check_arrivals(rate, duration_s, seed)  # before a source that may take minutes
    source = length_source(workload, lengths, max_model_len, tokenizer)
    if arrivals == "authors":
        source = AuthorsPairs.of(source, workload, max_model_len)
    return build_trace(workload, source, rate, duration_s, seed, arrivals)


def length_source(
    workload: str, lengths: str | None = None, max_model_len: int = 2048, tokenizer: str = OPT_TOKENIZER
) -> LengthSource:
    """Where a trace's lengths come from; `lengths` and the rest as for `make_trace`."""
    if lengths is None:
        return fig11_lengths(workload, max_model_len)
    lengths = os.fspath(instance("lengths", lengths, (str, os.PathLike), "the name of a file, 'hub' or None"))
    tokenizer = os.fspath(instance("tokenizer", tokenizer, (str, os.PathLike), "a hub id or a folder"))
    if lengths == "hub" or is_dataset_file(lengths):
        return lengths_from_dataset(workload, None if lengths == "hub" else lengths, tokenizer, max_model_len)
    return lengths_from_csv(lengths, workload, max_model_len)
