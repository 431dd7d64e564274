"""Joins what bench_step and the peers printed into one table: python3 speed_table.py LOG…

Reads every line that is a JSON object (after a launcher's "[rank] "), and limit.py's object over several lines. Medians are medians of
the turns' medians, with the smallest and largest turn."""
import json, re, statistics, sys


def objects(text):
    """JSON objects that start at the beginning of a line."""
    text = re.sub(r"(?m)^\[\d+\] ", "", text)
    decoder = json.JSONDecoder()
    for start in re.finditer(r"(?m)^\{", text):
        try:
            yield decoder.raw_decode(text, start.start())[0]
        except ValueError:
            pass


def peer_name(args):
    words = ["plain PyTorch" if args.get("plain") else "FSDP2"]
    words += [word for word in ("compile", "fused") if args.get(word)]
    return " + ".join(words)


def row_of(o):
    """(shape, ranks, name, ms, peak GB), or nothing for other objects."""
    if o.get("bench") == "step" and "step_ms" in o and "simulated_ranks" not in o:
        shape = f"{o['parameters'] / 1e6:.0f}M, {o['batch']}x{o['seq']}"
        name = "fsdpp" if o["variant"] == "sharded" else o["variant"].replace("sharded-", "fsdpp ")
        return shape, o["world"], name, o["step_ms"], o["peak_bytes"] / 1e9
    if "params" in o and "args" in o and "step_ms" in o:
        shape = f"{o['params'] / 1e6:.0f}M, {o['args']['batch']}x{o['args']['seq']}"
        return shape, o["world"], peer_name(o["args"]), o["step_ms"], o["peak_gb"]
    return None


def collect(texts):
    rows, limit = {}, None
    for o in (o for text in texts for o in objects(text)):
        limit = o.get("limit_bf16_ms", limit)
        row = row_of(o)
        if row:
            rows.setdefault(row[:3], []).append(row[3:])
    return rows, limit


def table(rows, limit):
    """Lines: by shape and number of ranks; ratio: this row's time over fsdpp's, so above 1 where fsdpp is faster."""
    head = ["shape", "ranks", "step of", "ms", "turns", "peak GB", "its ms / fsdpp's", "tokens/s/rank", "weak scaling"]
    lines = [head]
    for (shape, ranks, name), turns in sorted(rows.items(), key=lambda kv: (kv[0][0], kv[0][1], statistics.median(t[0] for t in kv[1]))):
        ms = statistics.median(t[0] for t in turns)
        own = rows.get((shape, ranks, "fsdpp"))
        alone = rows.get((shape, 1, name))
        batch, seq = map(int, shape.split(", ")[1].split("x"))
        lines.append([shape, str(ranks), name, f"{ms:.2f}", f"{min(t[0] for t in turns):.2f}..{max(t[0] for t in turns):.2f}",
                      f"{max(t[1] for t in turns):.2f}", f"{ms / statistics.median(t[0] for t in own):.3f}" if own else "-",
                      f"{batch * seq / ms * 1e3:.0f}", f"{statistics.median(t[0] for t in alone) / ms:.3f}" if alone else "-"])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.ljust(w) if i in (0, 2) else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))).rstrip() for line in lines]
    if limit:
        text.append(f"limit of the seed's shape on one GPU (benchmarks/peers/limit.py): {limit} ms")
    return text


if __name__ == "__main__":
    print("\n".join(table(*collect([open(path, errors="replace").read() for path in sys.argv[1:]]))))
