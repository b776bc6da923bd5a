"""Configuration: from YAML and command lines to typed objects and back; every error names its key."""

from qkvflow.config.decode import decode
from qkvflow.config.encode import differences, encode, listed, read_config, write_config
from qkvflow.config.scalars import Keys, Text, Typed
from qkvflow.config.yaml_file import read_yaml

__all__ = [
    "Keys",
    "Text",
    "Typed",
    "decode",
    "differences",
    "encode",
    "listed",
    "read_config",
    "read_yaml",
    "write_config",
]
