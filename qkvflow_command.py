"""The command `qkvflow`: `qkvflow train`, `qkvflow sample`, ...; each runs one of the package's programs.

It stands beside the package, because importing `qkvflow` imports JAX, which `qkvflow --help` can do without.
"""

import difflib
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from typing import NamedTuple

VERSION = "0.2.0"
USER_ERROR = 2


class Command(NamedTuple):
    """A subcommand: the module that `python -m` runs too, and what it does in one line."""

    module: str
    about: str


COMMANDS = {
    "train": Command("qkvflow.train_lm", "train a model; without a configuration, the quickstart"),
    "finetune": Command("qkvflow.finetune_lm", "fine-tune a run, also at a different depth: flow, full, stack or LoRA"),
    "eval": Command("qkvflow.eval_lm", "loss and benchmark tasks of a run, at any depth and with any solver"),
    "sample": Command("qkvflow.sample_lm", "continue a prompt"),
    "serve": Command("qkvflow.serve_lm", "serve a run over HTTP to clients of the OpenAI API"),
    "describe": Command("qkvflow.describe", "parameters, FLOPs and memory of configurations or runs, before you train"),
    "convert": Command("qkvflow.convert", "import and export Hugging Face checkpoints"),
    "lift": Command("qkvflow.lift", "fit a flow W(t) to the layers of a pretrained model"),
    "report": Command("qkvflow.analysis.report", "one HTML page on the internal dynamics of a run"),
    "spectral": Command("qkvflow.analysis.spectral", "eigenvalues of QK, OV and FF over layer-time"),
    "lyapunov": Command("qkvflow.analysis.lyapunov", "Lyapunov exponents of a run on a text"),
}
HELP, VERSION_FLAGS, COMPLETION = ("--help", "-h", "help"), ("--version", "-V"), "--completion"
_MODEL = ("--config_path", "--config", "--model", "--model.type")
QUICKSTART = ["--config_path", "configs/quickstart.yaml"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that the command line names.

    Returns:
        the exit status of `--help`, `--version` and of a mistake. A subcommand ends the process itself.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    first = words[0] if words else None
    if first in HELP:
        if words[1:2] and words[1] in COMMANDS:  # `qkvflow help train`
            return _run(words[1], ["--help", *words[2:]])
        sys.stdout.write(usage())
    elif first in VERSION_FLAGS:
        sys.stdout.write(f"qkvflow {VERSION}\n")
    elif first == COMPLETION:
        sys.stdout.write(f"complete -o default -W '{' '.join(COMMANDS)}' qkvflow\n")
    elif first is None:
        sys.stderr.write(usage())
        return USER_ERROR
    elif first in COMMANDS:
        return _run(first, words[1:])
    else:
        sys.stderr.write(f"error: {_unknown(first)}\n")
        return USER_ERROR
    return 0


def usage() -> str:
    """What `qkvflow --help` prints."""
    width = max(map(len, COMMANDS)) + 3
    commands = "\n".join(f"  {name:<{width}}{command.about}" for name, command in COMMANDS.items())
    return f"""Language models whose depth is a differential equation, dx/dt = B(x; W(t)).

usage: qkvflow COMMAND [--key.subkey VALUE ...]

{commands}

  qkvflow COMMAND --help   the keys of a command, with defaults (--help KEY: the keys below one)
  qkvflow --version        the version
  qkvflow --completion     completion of commands for bash: eval "$(qkvflow --completion)"
"""


def train_words(words: Sequence[str]) -> list[str]:
    """The command line of `train`, which takes the quickstart if neither a file nor a model's type is given."""
    given = {word.partition("=")[0] for word in words}
    return list(words) if given & {*_MODEL, *HELP} else [*QUICKSTART, *words]


def called(name: str) -> str:
    """How a person calls a subcommand here: `qkvflow sample`, or what does the same where that is not on the PATH."""
    if shutil.which("qkvflow") is not None:
        return f"qkvflow {name}"
    beside = os.path.relpath(os.path.join(os.path.dirname(sys.executable), "qkvflow"))
    return f"{beside} {name}" if os.path.exists(beside) else f"python -m {COMMANDS[name].module}"


def _run(name: str, words: Sequence[str]) -> int:
    module = COMMANDS[name].module
    sys.argv[1:] = train_words(words) if name == "train" else words
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _unknown(word: str) -> str:
    near = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    meant = f"did you mean `{near[0]}`? " if near else ""
    return f"qkvflow has no command `{word[:120]}`: {meant}The commands are {', '.join(COMMANDS)} (see qkvflow --help)"


if __name__ == "__main__":
    sys.exit(main())
