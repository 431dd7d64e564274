"""Communication that nothing hid, from the report.json of a profile: python3 exposed_table.py REPORT.json. Silent without the file."""
import json, os, sys

if __name__ == "__main__" and os.path.exists(sys.argv[1]):
    summary = json.load(open(sys.argv[1]))["summary"]
    step, exposed = summary["step_ms"], summary["exposed_ms_per_step"]
    overlap = summary["overlap"]
    print(f"profile: step {step:.2f} ms, exposed communication {exposed:.3f} ms ({100 * exposed / step:.2f} % of the step), "
          f"overlap {'-' if overlap is None else f'{100 * overlap:.1f} %'}, idle {summary['idle_ms_per_step']:.3f} ms")
    for unit, ms in sorted(summary["units"].items(), key=lambda kv: -kv[1])[:8]:
        print(f"  exposed of {unit or '(root)'}: {ms:.3f} ms")
