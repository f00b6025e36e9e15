"""Fewer and larger operations per layer, by torch.compile: what a GPU needs to be busy with one token a sequence.

One compilation of a decoder layer serves all layers and all batch sizes. It fuses the small operations between matrix
products, and runs projections of the same input as one product: their weights are laid side by side, each projection is
a slice of the common product, and equal products are computed once."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

#: projections of one input, as transformers' models name them
COMMON_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def compile_layers(model: nn.Module) -> None:
    """Replace the decoder layers' calls by compiled ones, in place."""
    options = {"post_grad_custom_pre_pass": _compute_equal_nodes_once}
    for layer in model.get_decoder().layers:
        if layer._compiled_call_impl is not None:
            continue  # for an earlier executor of the same model
        for module in layer.modules():
            for names in COMMON_INPUT:
                if all(isinstance(getattr(module, name, None), nn.Linear) for name in names):
                    _lay_side_by_side(module, names)
        layer.compile(dynamic=True, fullgraph=True, options=options)


class _Part(nn.Module):
    """Columns `start` to `stop` of a product that several projections share."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, start: int, stop: int) -> None:
        super().__init__()
        self.weight, self.bias, self.start, self.stop = weight, bias, start, stop

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)[..., self.start : self.stop]


def _lay_side_by_side(module: nn.Module, names: Sequence[str]) -> None:
    parts = [getattr(module, name) for name in names]
    weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    has_bias = parts[0].bias is not None
    bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False) if has_bias else None
    start = 0
    for name, part in zip(names, parts):
        setattr(module, name, _Part(weight, bias, start, start + part.out_features))
        start += part.out_features


def _compute_equal_nodes_once(graph: fx.Graph) -> None:
    """Let equal calls of operators without side effects share one node."""
    seen: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        is_operator = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
        if not is_operator or node.target._schema.is_mutable:
            continue
        first = seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
