"""Command lines of all programs: YAML plus `--key.subkey value`, actionable errors, a clean exit."""

from qkvflow.cli.arguments import parse
from qkvflow.cli.program import run_program

__all__ = ["parse", "run_program"]
