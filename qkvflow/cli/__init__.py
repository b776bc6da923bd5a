"""Command lines of all programs: YAML plus `--key.subkey value`, errors a person can act on, a clean exit."""

from qkvflow.cli.arguments import parse
from qkvflow.cli.decode import decode
from qkvflow.cli.program import run_program
from qkvflow.cli.scalars import Text

__all__ = ["Text", "decode", "parse", "run_program"]
