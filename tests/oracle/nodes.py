"""The vocabulary of models in Python: the twin of nodes.cpp. A node is a dict with a "kind"; containers have "children"."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from case_numbers import random_tensor

ACTIVATIONS = {"tanh": torch.tanh, "gelu": F.gelu, "silu": F.silu}


class Leaf(nn.Module):
    """A module with parameters of its own and a function of them."""

    def __init__(self, node, function):
        super().__init__()
        self.node = node
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class Sequence(nn.Module):
    def __init__(self, repeats, residual):
        super().__init__()
        self.repeats, self.residual = repeats, residual

    def forward(self, x):
        y = x
        for child in self.children():
            for _ in range(self.repeats):
                y = child(y)
        return x + y if self.residual else y


class Unused(nn.Module):
    def forward(self, x):
        return x


FUNCTIONS = {
    "linear": lambda m, x: F.linear(x.to(m.weight.dtype), m.weight, getattr(m, "bias", None)),
    "tied": lambda m, x: F.linear(x.to(m.weight.dtype), m.weight),
    "transposed": lambda m, x: torch.matmul(x.to(m.weight.dtype), m.weight),
    "embedding": lambda m, x: F.embedding(x, m.weight),
    "layernorm": lambda m, x: F.layer_norm(x.to(m.weight.dtype), (x.size(-1),), m.weight, m.bias, 0.1),
    "rmsnorm": lambda m, x: F.rms_norm(x.to(m.weight.dtype), (x.size(-1),), m.weight, 0.1),
    "scalar": lambda m, x: x * m.weight,
    "buffer": lambda m, x: x + m.weight,
    "pair": lambda m, x: x * m.weight[0] + m.weight[1],
    "wide": lambda m, x: x * m.weight.mean().to(x.dtype),
    "empty": lambda m, x: x + m.weight.sum().to(x.dtype),
    "cube": lambda m, x: x + m.weight.mean((0, 1)),
    "act": lambda m, x: ACTIVATIONS[m.node["name"]](x),
    "gate": lambda m, x: x * m.weight if m.used else x,
}


def shapes_of(node):
    """Shapes of the node's own parameters, by name, in order of registration."""
    kind = node["kind"]
    if kind == "linear":
        bias = {"bias": (node["out"],)} if node["bias"] else {}
        return {"weight": (node["out"], node["in"]), **bias}
    if kind == "transposed":
        return {"weight": (node["in"], node["out"])}
    if kind == "layernorm":
        return {"weight": (node["dim"],), "bias": (node["dim"],)}
    if kind == "rmsnorm":
        return {"weight": (node["dim"],)}
    if kind in ("act", "buffer", "tied") or "children" in node:
        return {}
    return {"weight": tuple(node["shape"])}


def _make_leaf(node, case, rank, made):
    kind = node["kind"]
    leaf = Leaf(node, FUNCTIONS[kind])
    dtype = torch.float64 if kind == "wide" else getattr(torch, case["dtype"])
    for name, shape in shapes_of(node).items():
        data = torch.empty(shape[::-1], dtype=dtype).t() if kind == "transposed" else torch.empty(shape, dtype=dtype)
        leaf.register_parameter(name, nn.Parameter(data))
    if kind == "buffer":
        leaf.register_buffer("weight", torch.empty(tuple(node["shape"]), dtype=dtype))
    if kind == "tied":
        leaf.weight = made[node["to"]].weight
    if kind == "gate":
        leaf.used = rank in node["used_by"]
    return leaf


def _make_node(node, path, case, rank, made):
    kind = node["kind"]
    if "children" in node:
        module = Unused() if kind == "unused" else Sequence(2 if kind == "twice" else 1, kind == "residual")
        for i, child in enumerate(node["children"]):
            module.add_module(str(i), _make_node(child, f"{path}.{i}" if path else str(i), case, rank, made))
    else:
        module = _make_leaf(node, case, rank, made)
    for name in node.get("frozen", []):
        getattr(module, name).requires_grad_(False)
    made[path] = module
    return module


def _fill(name, p, seed, stream):
    if p.dim() >= 2:
        values = random_tensor(tuple(p.shape), seed, stream, 0.0, 1.5 / math.sqrt(max(1, p.size(-1))))
    else:
        values = random_tensor(tuple(p.shape), seed, stream, 0.0 if name.endswith("bias") else 1.0, 0.3)
    p.copy_(values)


def make_model(case, rank):
    """The model of a case, and its modules by path."""
    made = {}
    root = _make_node(case["model"], "", case, rank, made)
    stream = 0
    with torch.no_grad():
        for name, p in root.named_parameters():
            _fill(name, p, case["numbers"], stream)
            stream += 1
        for _, b in root.named_buffers():
            b.copy_(random_tensor(tuple(b.shape), case["numbers"], stream, 0.0, 0.3))
            stream += 1
    return root, made
