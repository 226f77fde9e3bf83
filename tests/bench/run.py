"""`make bench [NAME=x]`: run one benchmark, or all of them one after another, and print one table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    sys.path.insert(0, str(HERE))
    names = sys.argv[1:] or sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        # A process each: thread counts, allocators and process groups of one must not colour the next.
        if subprocess.run([sys.executable, str(HERE / f"bench_{name}.py")], check=False).returncode:
            failed.append(name)
    if len(names) > 1:
        import harness

        print("\n== all results")
        for name in names:
            path = harness.RESULTS / f"{name}.json"
            if path.exists():
                harness.print_table(name, json.loads(path.read_text(encoding="utf-8"))["cases"])
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
