#!/usr/bin/env python3
"""Traces of hand-made schedules in the tools that read them, and the checks of scripts/profiler_compare.py themselves.

Usage: trace_tools_test.py EXAMPLE COMPARE [TOOLS]: the program that writes the traces, the script, and the interpreter that has
HolisticTraceAnalysis and perfetto (default: this one). Says so where a tool is missing.
"""
import copy
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

EXAMPLE, COMPARE = sys.argv[1], sys.argv[2]
TOOLS = sys.argv[3] if len(sys.argv) > 3 else sys.executable
COUNTED = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"


def compare(*arguments, interpreter=sys.executable):
    done = subprocess.run([interpreter, COMPARE, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    return done.returncode, done.stdout


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name, content):
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path


class Traces(Files):
    def setUp(self):
        super().setUp()
        subprocess.run([EXAMPLE, self.folder], check=True)

    def test_every_file_is_well_formed(self):
        for name, ranks in (("rank0.json", 1), ("step.json.gz", 1), ("merged.json.gz", 2)):
            code, said = compare("trace", self.folder / name, "--ranks", ranks)
            self.assertEqual(code, 0, f"{name}: {said}")

    def test_damage_is_found(self):
        whole = json.loads((self.folder / "rank0.json").read_text())
        slices = [e for e in whole["traceEvents"] if e["ph"] == "X" and e.get("cat") == "kernel"]
        crossing = copy.deepcopy(whole)
        crossing["traceEvents"].append({**slices[0], "ts": slices[0]["ts"] + slices[0]["dur"] / 2})
        orphan = copy.deepcopy(whole)
        orphan["traceEvents"] = [e for e in whole["traceEvents"] if e["ph"] != "s"]
        for bad in (crossing, orphan, {"traceEvents": []}):
            self.assertEqual(compare("trace", self.write("bad.json", bad))[0], 1)
        self.assertEqual(compare("trace", self.folder / "rank0.json", "--ranks", 2)[0], 1)

    def test_hta_opens_it(self):
        code, said = compare("hta", self.folder / "rank0.json", interpreter=TOOLS)
        if code == 77:
            self.skipTest(said)
        self.assertEqual(code, 0, said)
        self.assertIn("COMMUNICATION", said)

    def test_perfetto_opens_it(self):
        for name in ("rank0.json", "merged.json.gz"):
            code, said = compare("perfetto", self.folder / name, interpreter=TOOLS)
            if code == 77:
                self.skipTest(said)
            self.assertEqual(code, 0, said)


class Times(Files):
    def run_with(self, ours, theirs):
        files = [self.write(f"{i}.json", {"calls": 60, "kernels": kernels}) for i, kernels in enumerate(ours + theirs)]
        return compare("times", *files[: len(ours)], "--with", *files[len(ours):])[0]

    def test_equal_medians_pass_and_drift_between_runs_cancels(self):
        self.assertEqual(self.run_with([{"void k<(int)4>(int)": [100] * 60}, {"void k<(int)4>(int)": [110] * 60}],
                                       [{"void k<4>(int)": [101] * 60}, {"void k<4>(int)": [109] * 60}]), 0)

    def test_a_kernel_that_differs_is_missing_or_too_rare_fails(self):
        self.assertEqual(self.run_with([{"k": [100] * 60}], [{"k": [103] * 60}]), 1)
        self.assertEqual(self.run_with([{"k": [100] * 60, "l": [1] * 60}], [{"k": [100] * 60}]), 1)
        self.assertEqual(self.run_with([{"k": [100] * 49}], [{"k": [100] * 49}]), 1)

    def test_launches_of_one_kernel_are_compared_by_their_place_in_a_call(self):
        self.assertEqual(self.run_with([{"k": [100, 200] * 60}], [{"k": [101, 199] * 60}]), 0)
        self.assertEqual(self.run_with([{"k": [100, 200] * 60}], [{"k": [100, 210] * 60}]), 1)


class Ncu(Files):
    METRICS = ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", COUNTED)

    def run_with(self, product, copied):
        rows = [("0", "nvjet_a", "1", "1", "1"), ("1", "nvjet_a", "95.0", "20.0", "93.0"), ("2", "void copy<4>(int)", "12.5", "91.0", "0"),
                ("3", "void copy<4>(int)", "12.5", "1,091.0", "0"), ("4", "void copy<4>(int)", "12.5", "91.0", "0"),
                ("5", "void copy<4>(int)", "12.5", "91.0", "0")]
        lines = ["==PROF== Connected", ",".join(f'"{c}"' for c in ("ID", "Kernel Name") + self.METRICS), '"","","%","%","%"']
        lines += [",".join(f'"{c}"' for c in row) for row in rows]
        kernels = {name: {"compute": c, "memory": m, "us": 10, "bound": "b", "source": "measured", "raw": [{COUNTED: c}]}
                   for name, (c, m) in (("nvjet_a", product), ("void copy<4>(int)", copied))}
        counters = self.write("counters.json", {"source": "speed of light: measured", "kernels": kernels})
        return compare("ncu", self.write("ncu.csv", "\n".join(lines)), counters)

    def test_within_five_points_passes(self):
        code, said = self.run_with((92, 22), (10, 94))
        self.assertEqual(code, 0, said)

    def test_beyond_or_absent_fails(self):
        self.assertEqual(self.run_with((89, 22), (10, 94))[0], 1)
        self.assertEqual(self.run_with((92, 22), (10, 80))[0], 1)
        self.assertEqual(self.run_with((92, 22), (10, None))[0], 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
