"""What every benchmark's command line begins and ends with: its help, --json FILE, --check, and the exit code."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the benchmark's own text, with the two options that all of them have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where results are written")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    return parser


def write_json(path: Path | None, results: Any) -> None:
    """Results, a dataclass or a list of them, where a path was given."""
    if path is not None:
        path.write_text(json.dumps(_plain(results), indent=2))


def exit_code(check: bool, missed: Sequence[str]) -> int:
    """Name every target missed; 1 where there is one and it was asked for."""
    for line in missed:
        print(f"missed: {line}")
    return 1 if check and missed else 0


def _plain(results: Any) -> Any:
    if isinstance(results, list):
        return [_plain(result) for result in results]
    return asdict(results) if is_dataclass(results) and not isinstance(results, type) else results
