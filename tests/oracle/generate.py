"""Random cases of the oracle. Case K of a seed depends on these two alone.

`generate.py --seed S [--only K | --count N]` prints them as JSON. A case is a plain dict: a model (see nodes.py), the units that
fully_shard makes of it, and how it is trained."""
import argparse
import json
import random

NO_POLICY = {"param": None, "reduce": None, "output": None, "cast_inputs": True}
POLICIES = [
    {"param": "bfloat16", "reduce": "float32", "output": None, "cast_inputs": True},
    {"param": "bfloat16", "reduce": "float32", "output": "float32", "cast_inputs": True},
    {"param": "bfloat16", "reduce": None, "output": None, "cast_inputs": True},
    {"param": "bfloat16", "reduce": "bfloat16", "output": "float32", "cast_inputs": True},
    {"param": "bfloat16", "reduce": "float32", "output": None, "cast_inputs": False},
    {"param": None, "reduce": "bfloat16", "output": None, "cast_inputs": True},
    {"param": "float16", "reduce": "float32", "output": "float32", "cast_inputs": True},
    {"param": None, "reduce": None, "output": "bfloat16", "cast_inputs": True},
]
SCHEMES = ["root", "blocks", "blocks", "nested", "leaves", "groups"]


def walk(node, path=""):
    """(path, node), parents first."""
    yield path, node
    for i, child in enumerate(node.get("children", [])):
        yield from walk(child, f"{path}.{i}" if path else str(i))


class Generator:
    def __init__(self, seed, k):
        self.r = random.Random(f"{seed}/{k}")
        self.seed, self.k = seed, k

    def chance(self, p):
        return self.r.random() < p

    # -- model -----------------------------------------------------------------------------------------------------------

    def linear(self, inner, outer):
        if self.odd and self.chance(0.2):
            return {"kind": "transposed", "in": inner, "out": outer}
        return {"kind": "linear", "in": inner, "out": outer, "bias": self.chance(0.6)}

    def extra(self):
        """Something of odd shape that keeps the width."""
        d = self.dim
        kind = self.r.choice(["pair", "buffer", "cube", "gate", "matrix"] + (["norm"] if d > 2 else []) + (["scalar", "wide", "empty", "gate"] if self.odd else []))
        if kind == "matrix":
            return self.linear(d, d)
        if kind == "norm":
            return {"kind": self.r.choice(["layernorm", "rmsnorm"]), "dim": d}
        if kind == "gate":
            ranks = range(self.ranks)
            used_by = self.r.choice([list(ranks), []] + ([[r for r in ranks if self.chance(0.5)]] if self.odd else []))
            return {"kind": "gate", "shape": [d], "used_by": used_by}
        shape = {"scalar": [], "pair": [2], "wide": [3], "empty": [0, 4], "buffer": [d], "cube": [self.r.randint(1, 5), 2, d]}
        return {"kind": kind, "shape": shape[kind]}

    def block(self):
        hidden = self.r.choice([1, 2, 3, 5, 9, 15, 16])
        parts = [self.linear(self.dim, hidden), {"kind": "act", "name": self.r.choice(["tanh", "gelu", "silu"])}, self.linear(hidden, self.dim)]
        if self.dim > 2 and self.chance(0.6):
            parts.insert(0, {"kind": self.r.choice(["layernorm", "rmsnorm"]), "dim": self.dim})
        while self.chance(0.4):
            parts.insert(self.r.choice([0, len(parts)]), self.extra())
        block = {"kind": self.r.choice(["residual", "residual", "seq"]), "children": parts}
        return {"kind": "twice", "children": [block]} if self.chance(0.12) else block

    def model(self):
        tokens = self.chance(0.6)
        self.vocab = self.r.choice([5, 7, 11, 16]) if tokens else 0
        self.dim = self.r.choice([1, 2, 3, 5, 7, 8])
        self.out = self.vocab or self.r.choice([1, 3, 4])
        parts = [self.block() for _ in range(self.r.randint(1, 3))]
        while self.chance(0.35):
            parts.insert(self.r.randint(0, len(parts)), self.extra())
        if self.chance(0.1):
            parts.insert(self.r.randint(0, len(parts)), {"kind": "unused", "children": [self.linear(self.dim, 3)]})
        if tokens:
            parts.insert(0, {"kind": "embedding", "shape": [self.vocab, self.dim]})
        tied = tokens and self.chance(0.25)
        parts.append({"kind": "tied", "to": "0"} if tied else {"kind": "linear", "in": self.dim, "out": self.out, "bias": self.chance(0.5)})
        root = {"kind": "seq", "children": parts}
        if self.chance(0.3):
            self.freeze(root)
        self.settle_gates(root)
        return root

    def settle_gates(self, root):
        """Ranks may use different parameters only where all of them need the same backward, so behind trainable tokens."""
        nodes = [n for _, n in walk(root)]
        if self.vocab and not any("frozen" in n for n in nodes):
            return
        for node in nodes:
            if node["kind"] == "gate" and node["used_by"]:
                node["used_by"] = list(range(self.ranks))

    def freeze(self, root):
        """A whole block or single parameters; never the head, so that there is always something to train."""
        from nodes import shapes_of
        parts = root["children"][:-1]
        if root["children"][-1]["kind"] == "tied":
            parts = parts[1:]
        whole = self.chance(0.4)
        for part in self.r.sample(parts, min(len(parts), self.r.randint(1, 2))):
            for _, node in walk(part):
                names = [n for n in shapes_of(node) if whole or self.chance(0.4)]
                if names:
                    node["frozen"] = names

    # -- units -----------------------------------------------------------------------------------------------------------

    def policy(self):
        if self.dtype == "float64":
            return self.r.choice([NO_POLICY] * 4 + [{"param": "float32", "reduce": "float64", "output": "float64", "cast_inputs": True}])
        return self.r.choice(POLICIES) if self.chance(0.4) else NO_POLICY

    def reshard(self):
        shards = self.ranks // max(1, self.replicate)
        groups = [k for k in range(1, shards + 1) if shards % k == 0]
        return self.r.choice([None, None, True, True, False, self.r.choice(groups)])

    def groups_of_modules(self, root):
        parts = [str(i) for i in range(len(root["children"]))]
        if self.scheme == "root":
            return []
        if self.scheme == "groups":
            cut = sorted(self.r.sample(range(1, len(parts)), min(len(parts) - 1, self.r.randint(1, 2))))
            groups = [parts[a:b] for a, b in zip([0] + cut, cut + [len(parts)])]
            if root["children"][-1]["kind"] == "tied" and self.chance(0.8):  # embedding and head as one unit
                groups = [[parts[0], parts[-1]]] + [[p] for p in parts[1:-1]]
            return [g for g in groups if self.chance(0.8)]
        inner = {p: n for p, n in walk(root) if p}
        if self.scheme == "leaves":
            chosen = [p for p, n in inner.items() if "children" not in n and self.chance(0.6)]
        else:
            chosen = [p for p, n in inner.items() if n["kind"] in ("residual", "seq", "twice", "unused") and self.chance(0.9)]
            if self.scheme == "nested":
                chosen += [p for p, n in inner.items() if "children" not in n and self.chance(0.35)]
            elif self.chance(0.3):
                chosen += [p for p in parts if p not in chosen and self.chance(0.4)]
        return [[p] for p in sorted(set(chosen), key=lambda p: (-p.count("."), [int(i) for i in p.split(".")]))]

    def units(self, root):
        main = self.policy()
        mixed = self.chance(0.2)
        units = []
        for modules in self.groups_of_modules(root) + [[""]]:
            units.append({"modules": modules, "reshard": self.reshard(), "policy": self.policy() if mixed else main, "ignored": []})
        if self.chance(0.3) and not any(unit["policy"]["param"] for unit in units):  # ignored ones keep their dtype
            frozen = [f"{p}.{name}" for p, n in walk(root) for name in n.get("frozen", []) if self.chance(0.5)]
            for unit in units:
                unit["ignored"] = frozen
        return units

    def prefetch(self, units, backward):
        """Lists of the units that come next: in forward by place, outer ones first, in backward the other way round."""
        order = sorted(range(len(units)), key=lambda i: [int(k) for k in units[i]["modules"][0].split(".") if k])
        if backward:
            order = sorted(order, key=lambda i: [-int(k) for k in units[i]["modules"][0].split(".") if k])
        lists = {}
        for i, unit in enumerate(order[:-1]):
            if self.chance(0.6):
                lists[str(unit)] = order[i + 1:i + 1 + self.r.randint(1, 2)]
        return lists

    # -- training --------------------------------------------------------------------------------------------------------

    def optimizer(self):
        kind = self.r.choice(["sgd", "sgd", "adamw", "fsdpp_adamw"])
        decay = self.r.choice([0.0, 0.01])
        if kind == "sgd":
            return {"kind": "sgd", "lr": self.r.choice([0.02, 0.05]), "momentum": self.r.choice([0.0, 0.9]), "weight_decay": decay}
        return {"kind": kind, "lr": 1e-2, "eps": 1e-2, "weight_decay": decay}

    def case(self):
        r = self.r
        self.ranks = r.choice([1, 2, 2, 3, 4, 4])
        self.replicate = r.choice([0, 0, 0] + [k for k in (1, 2, 3, 4) if self.ranks % k == 0])
        self.dtype = r.choice(["float32", "float32", "float64"])
        self.scheme = r.choice(SCHEMES)
        self.odd = self.chance(0.25)  # with what FSDP2 refuses
        model = self.model()
        units = self.units(model)
        micro = r.choice([1, 1, 2, 3])
        gates = [n["used_by"] for _, n in walk(model) if n["kind"] == "gate"]
        modes = ["each"] + (["sync_last"] if micro > 1 else []) + (["all_reduce_last"] if micro > 1 and self.replicate > 1 else [])
        lists = self.chance(0.25) and len(units) > 2 and not any(n["kind"] == "unused" for _, n in walk(model))
        idle = any("frozen" in n or n["kind"] in ("unused", "gate") for _, n in walk(model))  # not to be listed for a backward
        return {
            "id": self.k, "seed": str(self.seed), "numbers": r.getrandbits(40), "ranks": self.ranks, "replicate": self.replicate,
            "dtype": self.dtype, "vocab": self.vocab, "dim": self.dim, "out": self.out, "batch": r.randint(1, 3),
            "length": r.randint(1, 4), "model": model, "scheme": self.scheme, "units": units, "micro": micro, "mode": r.choice(modes),
            "reshard_after_backward": r.choice(["always"] * 6 + ["last"] * 2 + ["never"]), "is_last": self.chance(0.2),
            "reduce_unused": any(0 < len(g) < self.ranks for g in gates) or self.chance(0.04),
            "prefetch_forward": self.prefetch(units, False) if lists else {},
            "prefetch_backward": self.prefetch(units, True) if lists and not idle and self.chance(0.5) else {},
            "optimizer": self.optimizer(), "clip": r.choice([None, None, {"max": r.choice([0.1, 0.5]), "p": r.choice([1, 2, 2, 3, "inf"])}]),
            "set_to_none": self.chance(0.7), "steps": r.randint(2, 4),
        }


def make_cases(seed, ids):
    return [Generator(seed, k).case() for k in ids]


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--seed", default="1")
    p.add_argument("--count", type=int, default=1)
    p.add_argument("--only", type=int)
    a = p.parse_args()
    print(json.dumps(make_cases(a.seed, range(a.count) if a.only is None else [a.only]), indent=1))
