"""What wire codecs save, and what they do to the model.

Bytes and time: the embedding step of bench_hierarchical_exchange (two hosts of two ranks, 200 Mbit/s between them, Zipf
1.05), flat and hierarchical, with every codec for values and gradients alike. Quality: the quickstart's jobs to their
end, five seeds with fp32 and five with int8; a worker's own rows are rounded as those that travel, so one process does.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import numpy as np
import torch
import two_hosts
from bench_hierarchical_exchange import DIM, HOSTS, NUM_BATCHES, Side, ids_of

from shoal.actors.groups import GroupSpec, form
from shoal.jobs import quickstart
from shoal.jobs.train import ElasticTrainer
from shoal.kernels.codec import encoded_bytes
from shoal.kernels.spec import Codec

RATE, ALPHA, ROUNDS = 200, 1.05, 8
SEEDS = range(5)
EXPECTATION = (
    f"A row of {DIM} columns takes 256, 128, 128 and 68 bytes as fp32, fp16, bf16 and int8, and crosses as values and "
    "as gradients; its id (4 bytes) does not shrink: 516 / 140 = 3.7x fewer bytes with int8. Time follows the bytes "
    "while the network is the bound. 256 levels a row are finer than what one step of training changes, so AUC moves "
    "within the spread of the seeds."
)
BYTES_TARGET = 2.5


def run_rank(rank: int, names: list[str], port: int, meet: Any, results: Any) -> None:
    """All codecs, both ways, in turn."""
    two_hosts.enter(names[HOSTS[rank]])
    torch.set_num_threads(1)
    common = two_hosts.group_options("bench-codecs", rank, HOSTS, port)
    sides = {}
    for number, codec in enumerate(Codec):
        for way in ("flat", "hierarchical"):
            is_hierarchical = way == "hierarchical"
            groups = form(GroupSpec(epoch=2 * number + is_hierarchical, has_local=is_hierarchical, **common))
            sides[f"{way} {codec.name.lower()}"] = Side(groups, is_hierarchical=is_hierarchical, codec=codec)
    meet.wait()
    if rank == 0:
        two_hosts.limit(names, RATE)
    batches = [torch.from_numpy(ids_of(rank, batch, ALPHA)) for batch in range(NUM_BATCHES)]
    turns = {name: iter(batches * 2) for name in sides}
    seconds = harness.alternate(
        {name: lambda name=name: sides[name].run(next(turns[name])) for name in sides}, ROUNDS, before=meet.wait
    )
    steps = ROUNDS + 2
    results.put((rank, seconds, {name: side.across() / steps for name, side in sides.items()}))
    meet.wait()


def network_cases() -> list[dict[str, Any]]:
    """Bytes across hosts and time of a step, by way and codec."""
    found = two_hosts.run_on_hosts(HOSTS, run_rank, len(HOSTS))
    seconds = {n: [max(t) for t in zip(*(by_side[n] for _, by_side, _ in found))] for n in found[0][1]}
    sent = {n: sum(by_side[n] for _, _, by_side in found) for n in found[0][2]}
    unique = statistics.mean(len(np.unique(ids_of(0, batch, ALPHA))) for batch in range(NUM_BATCHES))
    cases = []
    for way in ("flat", "hierarchical"):
        plain = f"{way} fp32"
        for codec in (Codec.FP16, Codec.BF16, Codec.INT8):
            name = f"{way} {codec.name.lower()}"
            target = BYTES_TARGET if codec is Codec.INT8 else None
            cases.append(
                harness.case(
                    f"bytes across hosts, {name}", "MB", [sent[name]], [sent[plain]], plain, target, value_scale=1e-6,
                    row_bytes=encoded_bytes(codec, DIM), unique_ids_per_rank=unique,
                )
            )  # fmt: skip
            cases.append(
                harness.case(f"step, {name}", "ms", seconds[name], seconds[plain], plain, None, value_scale=1e3)
            )
    return cases


def auc_of(folder: Path, prepared: Any, seed: int, codec: str) -> float:
    """AUC on the validation data of the quickstart's job, trained in this process."""
    base = quickstart.job(prepared, folder / f"{prepared.name}-{codec}-{seed}", seed=seed, num_workers=0)
    defaults = base.tables.defaults.replace(values_codec=codec, gradients_codec=codec)
    job = dataclasses.replace(base, tables=dataclasses.replace(base.tables, defaults=defaults))
    return float(ElasticTrainer.from_config(job).fit().metrics["eval/auc"])


def quality_cases(folder: Path) -> list[dict[str, Any]]:
    """Mean AUC with int8 against the range of fp32's seeds."""
    cases = []
    for prepared in (
        quickstart.prepare(folder / "movielens", 0, None, lambda line: None),
        quickstart._generated(folder / "clicks", 0),
    ):
        auc = {c: [auc_of(folder, prepared, seed, c) for seed in SEEDS] for c in ("fp32", "int8")}
        spread = max(auc["fp32"]) - min(auc["fp32"])
        moved = abs(statistics.mean(auc["int8"]) - statistics.mean(auc["fp32"]))
        cases.append(
            harness.case(
                f"AUC, int8 against fp32, {prepared.name}", "AUC", [moved], None, None, spread, higher_is_better=False,
                auc_fp32=auc["fp32"], auc_int8=auc["int8"], spread_of_seeds=spread,
            )
        )  # fmt: skip
    return cases


def main() -> list[dict[str, Any]]:
    """Run all cases and write results/wire_codecs.json."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-codecs-"))
    try:
        return harness.write("wire_codecs", [*network_cases(), *quality_cases(folder)], EXPECTATION)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
