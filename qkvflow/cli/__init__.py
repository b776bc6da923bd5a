"""Command lines of all programs: YAML plus `--key.subkey value`, errors a person can act on, a clean exit."""

from qkvflow.cli.arguments import LITERAL, parse
from qkvflow.cli.decode import decode
from qkvflow.cli.program import run_program

__all__ = ["LITERAL", "decode", "parse", "run_program"]
