"""The packages of a wheel: those of `qkvflow`, and `configs/` as `qkvflow.configs`. The rest is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

configs = {"qkvflow.configs": "configs"}
configs |= {f"qkvflow.configs.{p.name}": f"configs/{p.name}" for p in sorted(Path("configs").iterdir()) if p.is_dir()}
setup(packages=[*find_packages(include=["qkvflow", "qkvflow.*"]), *configs], package_dir=configs)
