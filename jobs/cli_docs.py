"""The reference page of the command line, from its parsers. Pure; ``docs/generate.py`` writes it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from shoal.jobs.cli import build_parser

_INTRODUCTION = """# Command line

<!-- Generated from the parsers in jobs/ by docs/generate.py; edit the texts there. -->

`shoal COMMAND ...`, or `python -m shoal.jobs.cli COMMAND ...`. Exit codes: 0 done; 1 an error, in one line on stderr
(`error: [SHOAL-101] ...`; the code is stable); 2 wrong usage; 130 interrupted. `--debug` adds the traceback.

Ctrl-C, or SIGTERM, once: the step in progress is finished, a checkpoint written, and `train`, `resume` and `attach`
exit with 130; twice: everything ends at once, also with 130. Either way the run can be resumed, after the second from
its newest complete checkpoint.

On a Ray cluster: `ray job submit --working-dir . -- shoal train job.yaml`. Inside the job the job's own cluster is
used; elsewhere a local one is started, unless `--address` or `scaling.address` names one. `RAY_ADDRESS` alone is not
followed.
"""


def cli_markdown() -> str:
    """The page as Markdown."""
    parts = [_INTRODUCTION]
    for name, parser in _leaves(build_parser(), "shoal"):
        parts.append(f"## `{name}`\n\n{_text(parser)}\n\n{_table(parser)}")
    return "\n".join(parts)


def _leaves(
    parser: argparse.ArgumentParser, name: str, text: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parsers without subcommands, in order, with their full names."""
    subparsers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not subparsers:
        parser.description = parser.description or text
        yield name, parser
    for action in subparsers:
        texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for word, nested in action.choices.items():
            yield from _leaves(nested, f"{name} {word}", texts.get(word, ""))


def _text(parser: argparse.ArgumentParser) -> str:
    text = (parser.description or "").strip()
    return text[:1].upper() + text[1:] + "."


def _table(parser: argparse.ArgumentParser) -> str:
    rows = ["| argument | |", "|---|---|"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if not metavar and action.choices:
            metavar = "{" + ",".join(map(str, action.choices)) + "}"
        takes_value = not isinstance(action, argparse._StoreTrueAction)
        names = ", ".join(action.option_strings)
        shown = f"{names} {metavar}".strip() if names and takes_value else names or metavar
        rows.append(f"| `{shown}` | {action.help or ''} |".replace("RUN_DIR|JOB", "RUN_DIR\\|JOB"))
    return "\n".join(rows) + "\n"
