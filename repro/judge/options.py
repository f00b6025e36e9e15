"""The options of `python -m repro judge`: they are known before anything else of this room is imported."""

import argparse
import os
from pathlib import Path


def judge_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add them to a parser; the parser."""
    said = "addresses of servers of OpenAI's interface, such as http://127.0.0.1:8000"
    parser.add_argument("--target", nargs="+", default=[], metavar="URL", help=said)
    said = "what the ledger calls them (default: host and port)"
    parser.add_argument("--name", nargs="+", default=[], metavar="NAME", help=said)
    said = "a CSV file, or a folder for one; columns of other servers stay (default: results/judge)"
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help=said)
    parser.add_argument("--show", action="store_true", help="show the ledger as it is, and judge nothing")
    parser.add_argument("--budget", default="2m", metavar="TIME", help="for each server (default: 2m)")
    parser.add_argument("--model", metavar="NAME", help="which of the server's models (default: the first)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and lengths (default: 0)")
    said = "the key that the server asks for (default: $REPRO_API_KEY, or none)"
    parser.add_argument("--api-key", default=os.environ.get("REPRO_API_KEY") or None, metavar="KEY", help=said)
    return parser
