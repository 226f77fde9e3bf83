"""Write docs/config.md and docs/cli.md from the code: ``python docs/generate.py``."""

from pathlib import Path

from shoal.jobs.cli_docs import cli_markdown
from shoal.platform.config_docs import config_markdown

FOLDER = Path(__file__).parent

PAGES = {"config.md": config_markdown, "cli.md": cli_markdown}


def main() -> None:
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
