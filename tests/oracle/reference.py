"""The other side of the oracle: every case by plain PyTorch in one process, and by PyTorch FSDP2 on Gloo where it takes it.

reference.py CASES.json FOLDER: four ranks for all cases (a case of R ranks uses the first R), each leaves FOLDER/part<rank>.pt,
a dict with "plain" and "fsdp2", results by case. A case that FSDP2 refuses has {"refused": its message} there."""
import faulthandler
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from case_numbers import random_ids, random_tensor
from case_rules import beyond_fsdp2
from nodes import make_model

RANKS = 4
PATIENCE_S = float(os.environ.get("FSDPP_ORACLE_PATIENCE_S", 60))  # for one case; then the stacks are printed and the run ends
counts = {}


def count_collectives():
    """Counts FSDP2's own collectives; those of DTensor operations go by another way."""
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        def counted(*args, _original=getattr(dist, name), _name=name, **kwargs):
            counts[_name] = counts.get(_name, 0) + 1
            return _original(*args, **kwargs)
        setattr(dist, name, counted)


def dtype_of(name):
    return None if name is None else getattr(torch, name)


def loss_of(case, model, step, micro, rank, dtype=None):
    seed, stream = case["numbers"], 10000 + 2 * ((step * 16 + micro) * 16 + rank)
    own = dtype_of(case["dtype"])
    dtype = dtype or own
    if case["vocab"]:
        ids = random_ids((case["batch"], case["length"]), seed, stream, case["vocab"])
        target = random_ids((case["batch"] * case["length"],), seed, stream + 1, case["vocab"])
        return F.cross_entropy(model(ids).reshape(-1, case["vocab"]).to(dtype), target)
    x = random_tensor((case["batch"], case["dim"]), seed, stream).to(own).to(dtype)
    target = random_tensor((case["batch"], case["out"]), seed, stream + 1).to(own).to(dtype)
    return F.mse_loss(model(x).to(dtype), target)


def make_optimizer(case, parameters):
    o = case["optimizer"]
    if o["kind"] == "sgd":
        return torch.optim.SGD(parameters, lr=o["lr"], momentum=o["momentum"], weight_decay=o["weight_decay"])
    return torch.optim.AdamW(parameters, lr=o["lr"], eps=o["eps"], weight_decay=o["weight_decay"])


def clip(case, parameters):
    """The norm of the gradients, which are clipped if the case says so."""
    c = case["clip"]
    parameters = [p for p in parameters if p.numel()]  # the maximum norm of nothing is an error in PyTorch
    if c is None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    else:
        norm = torch.nn.utils.clip_grad_norm_(parameters, c["max"], float(c["p"]))
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


# -- plain ---------------------------------------------------------------------------------------------------------------


def run_plain(case, dtype=None):
    """In `dtype` (the case's, if None), all ranks' batches in one process. Models of the ranks differ where a gate asks for the rank, so there
    is one for each, on the same parameters."""
    ranks = range(case["ranks"])
    models = [make_model(case, r)[0].to(dtype) for r in ranks]
    for other in models[1:]:
        share_parameters(models[0], other)
    parameters = dict(models[0].named_parameters())
    optimizer = make_optimizer(case, parameters.values())
    losses, norms = [[] for _ in ranks], []
    for step in range(case["steps"]):
        optimizer.zero_grad(set_to_none=case["set_to_none"])
        for micro in range(case["micro"]):
            for r in ranks:
                loss = loss_of(case, models[r], step, micro, r, dtype)
                (loss / case["micro"] / case["ranks"]).backward()
                losses[r].append(loss.item())
        if case["reduce_unused"]:
            for p in parameters.values():
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
        norms.append(clip(case, parameters.values()))
        optimizer.step()
    with torch.no_grad():
        final = [loss_of(case, models[r], case["steps"], 0, r, dtype).item() for r in ranks]
    return {"losses": losses, "final_losses": final, "norms": norms, "weights": {n: p.detach().double() for n, p in parameters.items()}}


def share_parameters(owner, other):
    for a, b in zip(owner.modules(), other.modules()):
        for name, p in a.named_parameters(recurse=False):
            setattr(b, name, p)


# -- FSDP2 ---------------------------------------------------------------------------------------------------------------


def shard(case, made, mesh):
    for unit in case["units"]:
        modules = [made[path] for path in unit["modules"]]
        policy = unit["policy"]
        more = {} if unit["reshard"] is None else {"reshard_after_forward": unit["reshard"]}
        fully_shard(modules[0] if len(modules) == 1 else modules, mesh=mesh,
                    mp_policy=MixedPrecisionPolicy(dtype_of(policy["param"]), dtype_of(policy["reduce"]), dtype_of(policy["output"]),
                                                   policy["cast_inputs"]),
                    ignored_params={p for n, p in made[""].named_parameters() if n in unit["ignored"]} or None, **more)
    modules = [[made[path] for path in unit["modules"]] for unit in case["units"]]
    for kind in ("forward", "backward"):
        for unit, others in case[f"prefetch_{kind}"].items():
            getattr(modules[int(unit)][0], f"set_modules_to_{kind}_prefetch")([modules[o][0] for o in others])


def set_modes(case, model, micro):
    last = micro + 1 == case["micro"]
    if case["mode"] == "sync_last":
        model.set_requires_gradient_sync(last)
    if case["mode"] == "all_reduce_last":
        model.set_requires_all_reduce(last)
    if case["reshard_after_backward"] == "last":
        model.set_reshard_after_backward(last)
    if case["is_last"]:
        model.set_is_last_backward(last)


def run_fsdp2(case, rank, mesh):
    model, made = make_model(case, rank)
    shard(case, made, mesh)
    assert isinstance(model, FSDPModule)
    parameters = list(model.parameters())
    optimizer = make_optimizer(case, parameters)
    losses, norms = [], []
    counts.clear()
    for step in range(case["steps"]):
        optimizer.zero_grad(set_to_none=case["set_to_none"])
        for micro in range(case["micro"]):
            set_modes(case, model, micro)
            loss = loss_of(case, model, step, micro, rank)
            (loss / case["micro"]).backward()
            losses.append(loss.item())
        norms.append(clip(case, [p for p in parameters if isinstance(p, DTensor)]))
        optimizer.step()
    seen = dict(counts)
    with torch.no_grad():
        final = loss_of(case, model, case["steps"], 0, rank).item()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    weights = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().double() for n, p in model.named_parameters()}
    return {"losses": losses, "final_loss": final, "norms": norms, "counts": seen, "weights": weights if rank == 0 else None}


def try_fsdp2(case, rank, mesh):
    reason = beyond_fsdp2(case)
    if reason:
        return {"refused": reason}
    try:
        return run_fsdp2(case, rank, mesh)
    except (AssertionError, NotImplementedError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        return {"refused": f"{type(error).__name__}: {error}", "raised": True}


# -- processes -----------------------------------------------------------------------------------------------------------


def make_meshes(cases):
    """Meshes by (ranks, replicate). Every process makes all of them in one order: making groups is collective."""
    meshes = {}
    for ranks, replicate in sorted({(c["ranks"], c["replicate"]) for c in cases}):
        shape = (ranks,) if replicate == 0 else (replicate, ranks // replicate)
        names = ("shard",) if replicate == 0 else ("replicate", "shard")
        meshes[ranks, replicate] = DeviceMesh("cpu", torch.arange(ranks).view(shape), mesh_dim_names=names)
    return meshes


def worker(rank, cases, folder, store):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{store}")
    meshes = make_meshes(cases)
    count_collectives()
    results = {"plain": {}, "fsdp2": {}}
    for i, case in enumerate(cases):
        with open(f"{folder}/at{rank}", "w") as f:
            f.write(f"--seed {case['seed']} --only {case['id']}")
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        if rank < case["ranks"]:
            results["fsdp2"][case["id"]] = try_fsdp2(case, rank, meshes[case["ranks"], case["replicate"]])
        if i % RANKS == rank:
            results["plain"][case["id"]] = run_plain(case)
    faulthandler.cancel_dump_traceback_later()
    torch.save(results, f"{folder}/part{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    # Skip the interpreter's finalisation: a Gloo or autograd thread that asks for the GIL while it runs is ended by force,
    # and that ends in std::terminate now and then.
    os._exit(0)


if __name__ == "__main__":
    with open(sys.argv[1]) as f:
        cases = json.load(f)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (cases, sys.argv[2], f"{folder}/store"), nprocs=RANKS)
