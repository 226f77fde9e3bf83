"""What one would want to do after a run, as commands to copy. Pure."""

from __future__ import annotations

import shlex

from shoal.platform.config import TrainConfig


def next_commands(
    run_dir: str, *, has_test_data: bool, has_checkpoint: bool, train: TrainConfig
) -> list[tuple[str, str]]:
    """(command, what it does) for a finished run that was trained with these settings."""
    where = shlex.quote(run_dir)
    commands = []
    if has_checkpoint and has_test_data:
        commands.append((f"shoal eval {where}", "metrics on the test data"))
    if has_checkpoint:
        commands.append((f"shoal resume {where} -o {_longer(train)}", "train on from the last step"))
        commands.append((f"shoal ckpt ls {where}", "its checkpoints"))
        commands.append((f"shoal ckpt export {where} --out export", "tables as Parquet"))
    commands.append((f"tensorboard --logdir {shlex.quote(run_dir.rstrip('/') + '/metrics')}", "curves"))
    return commands


def _longer(train: TrainConfig) -> str:
    """The override that lets a run go on: twice the steps if they were what ended it, else twice the epochs."""
    return f"train.max_steps={2 * train.max_steps}" if train.max_steps else f"train.epochs={2 * train.epochs}"


def format_next_steps(commands: list[tuple[str, str]]) -> str:
    """The commands as an aligned block under the heading ``next:``."""
    width = max(len(command) for command, _ in commands)
    return "\n".join(["next:", *(f"  {command.ljust(width)}   # {what}" for command, what in commands)])
