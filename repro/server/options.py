"""The options of `python -m repro serve`: they are known before anything else of this room is imported."""

import argparse
import os


def serve_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add them to a parser; the parser."""
    parser.add_argument("model", metavar="MODEL", help="as for LLM; with --simulated one of the paper's, as opt-13b")
    parser.add_argument("--system", default="vllm-v1", metavar="NAME", help="vllm-v1 (default), vllm, orca-max, ...")
    said = "no model and no GPU: iterations take what a cost model says, a100-2023 or datasheet"
    parser.add_argument("--simulated", metavar="PROFILE", help=said)
    parser.add_argument("--device", metavar="NAME", help="of a real model: cpu (default) or cuda")
    said = "split a real model over so many GPUs, or with --device cpu over processes (default: 1)"
    parser.add_argument("--num-gpus", type=int, metavar="N", help=said)
    said = "the size of the K/V pool in tokens (default: as for LLM; simulated: the paper's)"
    parser.add_argument("--kv-slots", type=int, metavar="N", help=said)
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens a block (default: 16)")
    said = "refuse requests while N wait, with status 429 (default: refuse none)"
    parser.add_argument("--max-waiting", type=int, metavar="N", help=said)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port (default: 8000; 0: any free one)")
    said = "what clients must send as their API key (default: $REPRO_API_KEY, or none)"
    parser.add_argument("--api-key", default=os.environ.get("REPRO_API_KEY") or None, metavar="KEY", help=said)
    said = "write a line a request: what the simulator needs to decide the same (repro replay FILE)"
    parser.add_argument("--log", metavar="FILE", help=said)
    return parser
