#!/usr/bin/env python3
"""Compares what the profiler measured with what other tools measured of the same kernels; checks trace files.

    profiler_compare.py times OURS.json... --with THEIRS.json... [--limit 2]   medians by kernel name, in percent
    profiler_compare.py ncu NCU.csv COUNTERS.json [--limit 5]                  compute and DRAM percentages, in points
    profiler_compare.py trace FILE [--ranks N]                                 structure of a Chrome trace, plain or .gz
    profiler_compare.py hta FILE... / perfetto FILE                            opens it there, if the tool is installed (else 77)

Each prints a table and exits with 1 if a row is beyond the limit or the file is bad.
"""
import argparse
import collections
import csv
import gzip
import json
import pathlib
import re
import statistics
import sys
import tempfile

SKIPPED = 77
PRODUCT = re.compile(r"gemm|nvjet|xmma|cutlass", re.I)
COPY = re.compile(r"copy", re.I)
SM = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
DRAM = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
SAME = ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "sm__inst_executed.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed")  # ours too, so they must agree metric by metric


def load(path):
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt") as file:
        return json.load(file)


def plain(name):
    """Demanglers differ in blanks and in how they write constants."""
    short = re.sub(r"\s+|\((?:int|long|bool|unsigned int)\)", "", name)
    return short.replace("::(anonymousnamespace)", "")


def medians(paths):
    """(Kernel name, its place among those of the name in a call) to the median over runs of each run's median: clocks drift between runs,
    not within calls of one."""
    runs = collections.defaultdict(list)
    names = {}
    count = collections.Counter()
    for path in paths:
        run = load(path)
        for name, times in run["kernels"].items():
            places = max(1, len(times) // run["calls"]) if len(times) % run["calls"] == 0 else 1
            for place in range(places):
                key = plain(name), place
                runs[key].append(statistics.median(times[place::places]))
                names[key] = name
                count[key] += len(times[place::places])
    return {key: (statistics.median(values), count[key], names[key]) for key, values in runs.items()}


def compare_times(args):
    ours, theirs = medians(args.ours), medians(args.others)
    worst, compared = 0.0, 0
    for key, (mine, calls, name) in sorted(ours.items(), key=lambda item: -item[1][0]):
        if calls < 50:
            continue
        if key not in theirs:
            print(f"{mine / 1e3:11.2f} us  only ours           {name[:90]}")
            worst = float("inf")
            continue
        other = theirs[key][0]
        percent = 100 * (mine / other - 1)
        worst, compared = max(worst, abs(percent)), compared + 1
        print(f"{mine / 1e3:11.2f} us {other / 1e3:11.2f} us {percent:+7.2f} %  {calls} calls  {name[:90]}")
    print(f"{compared} kernels compared, worst {worst:.2f} %, limit {args.limit} %")
    return 0 if compared > 0 and worst <= args.limit else 1


def read_ncu(path):
    """Rows of `ncu --csv --page raw`, after its log lines; the row below the header holds units."""
    lines = [line for line in pathlib.Path(path).read_text().splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    return [row for row in rows if row.get("ID", "").strip().isdigit()]


def number(text):
    try:
        return float(text.replace(",", ""))
    except (AttributeError, ValueError):
        return None


def of_ncu(rows, pattern):
    found = [row for row in rows if pattern.search(row.get("Kernel Name", ""))]
    found = found[1:] or found  # the first call loads code
    values = {}
    for metric in {key for row in found for key in row}:
        numbers = [n for n in (number(row[metric]) for row in found) if n is not None]
        if numbers:
            values[metric] = statistics.median(numbers)
    return values


def mean_raw(kernel, metric):
    values = [row[metric] for row in kernel["raw"] if metric in row]
    return statistics.median(values) if values else None


def compare_ncu(args):
    rows, ours = read_ncu(args.csv), load(args.counters)
    print(ours["source"])
    bad = 0
    for what, pattern in (("product", PRODUCT), ("copy", COPY)):
        theirs = of_ncu(rows, pattern)
        mine = [(n, k) for n, k in ours["kernels"].items() if pattern.search(n)]
        if not theirs or not mine:
            print(f"{what}: missing, ncu has {len(theirs)} values, we have {len(mine)} kernels")
            bad += 1
            continue
        name, kernel = max(mine, key=lambda item: item[1]["us"])
        print(f"{what}: {name[:80]}: {kernel['bound']}, {kernel['source']}; raw of ours: {json.dumps(kernel['raw'][:1])}")
        pairs = [("compute, SM throughput", kernel["compute"], theirs.get(SM)),
                 ("memory, DRAM throughput", kernel["memory"], theirs.get(DRAM))]
        pairs += [(m, mean_raw(kernel, m), theirs.get(m)) for m in SAME]
        for label, a, b in pairs:
            if a is None or b is None:
                bad += label.startswith(("compute", "memory"))
                print(f"  {label:70} ours {a} ncu {b}")
                continue
            wrong = abs(a - b) > args.limit and label.startswith(("compute", "memory"))
            bad += wrong
            print(f"  {label:70} ours {a:6.2f} ncu {b:6.2f} {a - b:+6.2f} points{'  BEYOND THE LIMIT' if wrong else ''}")
    return 1 if bad else 0


def overlaps(events):
    """Events that cross another one's end on their track: Perfetto drops those."""
    crossing = 0
    tracks = collections.defaultdict(list)
    for e in events:
        tracks[e["pid"], e["tid"]].append((round(e["ts"] * 1000), -round(e.get("dur", 0) * 1000)))
    for spans in tracks.values():
        open_ends = []
        for start, minus in sorted(spans):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            crossing += bool(open_ends) and start - minus > open_ends[-1]
            open_ends.append(start - minus)
    return crossing


def check_trace(args):
    trace = load(args.file)
    events = trace["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    starts = {(e["cat"], e["id"]) for e in events if e["ph"] == "s"}
    ends = [(e["cat"], e["id"]) for e in events if e["ph"] == "f"]
    ranks = {m.group(1) for e in events if e["ph"] == "M" and e["name"] in ("process_name", "process_labels")
             for m in [re.search(r"rank (\d+)", json.dumps(e["args"]))] if m}
    joined = collections.defaultdict(set)
    for e in slices:
        if e.get("cat") == "collective":
            joined[e["args"]["Process Group Name"], e["args"]["Seq"]].add(e["pid"])
    both = sum(len(pids) > 1 for pids in joined.values())
    found = {"slices": len(slices), "kernels": sum(e.get("cat") == "kernel" for e in slices), "arrows": len(ends),
             "arrows without a start": sum(e not in starts for e in ends), "crossing slices": overlaps(slices), "ranks": len(ranks),
             "collectives": len(joined), "collectives on several ranks": both}
    print(", ".join(f"{k} {v}" for k, v in found.items()))
    bad = found["arrows without a start"] or found["crossing slices"] or not slices
    if args.ranks > 1:
        bad = bad or len(ranks) != args.ranks or both == 0
    return 1 if bad else 0


def open_in_hta(args):
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError:
        print("skipped: HolisticTraceAnalysis is not installed")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for rank, path in enumerate(args.files):
            files[rank] = str(pathlib.Path(path).resolve())
        analysis = TraceAnalysis(trace_files=files, trace_dir=folder)
        print(analysis.get_temporal_breakdown(visualize=False).to_string())
        if any(len(analysis.t.get_trace(rank)) == 0 for rank in files):
            return 1
        print(analysis.get_gpu_kernel_breakdown(visualize=False)[0].to_string())
    return 0


def open_in_perfetto(args):
    try:
        from perfetto.trace_processor import TraceProcessor
    except ImportError:
        print("skipped: the Python package perfetto is not installed")
        return SKIPPED
    try:
        processor = TraceProcessor(trace=args.file)
    except Exception as error:  # the package fetches the program itself from the network at first use
        print(f"skipped: no trace processor: {error}")
        return SKIPPED
    slices = next(iter(processor.query("select count(*) as n from slice"))).n
    query = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    problems = [(row.name, row.value) for row in processor.query(query)]
    expected = sum(e["ph"] == "X" for e in load(args.file)["traceEvents"])
    print(f"{slices} slices of {expected}; problems: {problems}")
    return 0 if slices == expected and not problems else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    times = commands.add_parser("times")
    times.add_argument("ours", nargs="+")
    times.add_argument("--with", dest="others", nargs="+", required=True)
    times.add_argument("--limit", type=float, default=2)
    times.set_defaults(call=compare_times)
    ncu = commands.add_parser("ncu")
    ncu.add_argument("csv")
    ncu.add_argument("counters")
    ncu.add_argument("--limit", type=float, default=5)
    ncu.set_defaults(call=compare_ncu)
    trace = commands.add_parser("trace")
    trace.add_argument("file")
    trace.add_argument("--ranks", type=int, default=1)
    trace.set_defaults(call=check_trace)
    hta = commands.add_parser("hta")
    hta.add_argument("files", nargs="+")
    hta.set_defaults(call=open_in_hta)
    perfetto = commands.add_parser("perfetto")
    perfetto.add_argument("file")
    perfetto.set_defaults(call=open_in_perfetto)
    args = parser.parse_args()
    sys.exit(args.call(args))


if __name__ == "__main__":
    main()
