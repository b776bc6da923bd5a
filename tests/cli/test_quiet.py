"""What a program shows of the notices of what it calls, and what it does not show."""

import logging
import subprocess
import sys
import warnings

from qkvflow.cli.quiet import quiet_libraries
from qkvflow.errors import Notice

PROGRAM = """
import sys, warnings
from dataclasses import dataclass
from qkvflow.cli import run_program
from qkvflow.errors import Notice

@dataclass
class Config:
    pass

def main(config):
    for _ in range(2):
        warnings.warn(Notice("step-7 is damaged. Taking step-6"), stacklevel=2)

run_program(main, Config)
"""


def test_a_notice_is_a_line_each_time_and_in_the_log(tmp_path, capfd):
    with quiet_libraries() as quiet:
        quiet.log_to(tmp_path / "log")
        for _ in range(2):
            warnings.warn(Notice("step-7 is damaged"), stacklevel=1)
        logging.getLogger("another").info("a line")
    assert capfd.readouterr().err == "warning: step-7 is damaged\n" * 2
    log = (tmp_path / "log").read_text()
    assert log.count("step-7 is damaged") == 2
    assert "another: a line" in log


def test_a_program_shows_a_notice_without_file_and_line():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "warning: step-7 is damaged. Taking step-6\n" * 2)
