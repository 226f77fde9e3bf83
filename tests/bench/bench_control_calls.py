"""Ray client calls made by a worker over 200 steps: a step must make none."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))

import harness
import parity

EXPECTATION = (
    "A Ray call costs about 1.6 ms, so none may be on the step's path: workers are polled, never call. The feed asks "
    "for blocks once per window, in its own thread."
)
STEPS = 200


class CountingModel(parity.TinyModel):
    """Counts, in its worker, calls of the Ray client made by the step's thread and by any thread."""

    def __init__(self) -> None:
        super().__init__()
        import threading

        import ray

        self.calls: dict[str, int] = {"step": 0, "other": 0}
        self.step_thread: int | None = None

        def counted(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.calls["step" if threading.get_ident() == self.step_thread else "other"] += 1
                return original(*args, **kwargs)

            return call

        for name in ("get", "put", "wait"):
            setattr(ray, name, counted(getattr(ray, name)))
        ray.actor.ActorMethod._remote = counted(ray.actor.ActorMethod._remote)

    def forward(self, batch: Any) -> Any:
        import threading

        self.step_thread = threading.get_ident()
        return super().forward(batch)


def main() -> list[dict[str, Any]]:
    """Run 200 steps on a local Ray cluster with 2 workers and read the counts from the workers."""
    import ray

    import shoal
    from shoal.actors.runtime import NAMESPACE

    folder = Path(tempfile.mkdtemp(prefix="control-"))
    parity.write_data(folder / "train", num_rows=4000)
    counts: list[dict[str, int]] = []
    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False, namespace="shoal")

    def read_counts(item: Any) -> None:
        if getattr(item, "step", 0) == STEPS and not counts:
            for actor in ray.util.list_named_actors(all_namespaces=True):
                if ":worker-" in actor["name"]:
                    handle = ray.get_actor(actor["name"], namespace=NAMESPACE)
                    counts.append(ray.get(handle.__ray_call__.remote(_counts), timeout=30))

    config = parity.job_config(folder / "train", max_steps=STEPS + 50, epochs=10)
    try:
        shoal.ElasticTrainer(
            model=CountingModel,
            data=config.data.to_dict(),
            train={"epochs": 10, "max_steps": STEPS + 50, "log_every_steps": 50},
            scaling={"num_workers": 2},
            run={"name": "control", "storage_path": str(folder / "runs")},
        ).fit(on_record=read_counts)
    finally:
        ray.shutdown()
    on_step = [float(c["step"]) / STEPS for c in counts]
    in_all = [float(c["other"]) for c in counts]
    cases = [
        harness.case("calls per step, step thread", "calls", on_step, None, None, 0, higher_is_better=False),
        harness.case(f"calls over {STEPS} steps, feed thread", "calls", in_all, None, None, None),
    ]
    return harness.write("control_calls", cases, EXPECTATION)


def _counts(actor: Any) -> dict[str, int]:
    """Runs inside a worker actor."""
    return dict(actor._worker.model.calls)


if __name__ == "__main__":
    main()
