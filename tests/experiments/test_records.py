"""Records: where they say that results come from."""

import platform

import pytest

from experiments import records

INTEL = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Processor\ncpu family\t: 6\nmodel\t\t: {model}\nflags\t: fpu\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (INTEL.format(model=143), "Intel(R) Xeon(R) Processor (family 6, model 143)"),
        (INTEL.format(model=85), "Intel(R) Xeon(R) Processor (family 6, model 85)"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", platform.machine()),
        (None, platform.machine()),
    ],
)
def test_processors_of_one_architecture_are_told_apart(cpuinfo, name, tmp_path):
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    assert records.processor(path) == name
