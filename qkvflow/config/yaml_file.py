"""YAML configuration files, and suggestions for mistyped file names."""

import difflib
import os
from pathlib import Path
from typing import Any

from qkvflow.config.yaml_text import load, plain
from qkvflow.errors import UserError, shortened
from qkvflow.files import local_path

_LONGEST_FILE = 4 << 20  # bytes: no person writes a longer one, and the parser would take minutes


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, read by a safe loader (a file can never run code), as plain data.

    Raises:
        UserError: there is no such file, or it holds no mapping in valid YAML.
    """
    return plain(read_written(path))


def read_written(path: Path) -> dict[str, Any]:
    """`read_yaml`, with numbers that remember how they were written: what `decode` is best given."""
    path = local_path(path)
    name = shortened(str(path))
    try:
        with _found(path).open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        if len(content) > _LONGEST_FILE:
            raise UserError(f"cannot read the configuration file {name}: it has more than {_LONGEST_FILE >> 20} MiB")
        raw = load(content.decode("utf-8"), f"the file {name}")
    except FileNotFoundError:
        raise UserError(f"there is no configuration file {name}{_near_names(path)}") from None
    except IsADirectoryError:
        files = sorted(str(p) for p in path.glob("*.yaml"))
        listing = f"; it contains {', '.join(files)}" if files else ""
        raise UserError(f"{name} is a directory, but a configuration is a YAML file{listing}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot read the configuration file {name}: {reason}") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise UserError(f"{name} must contain `key: value` lines at its top level, but contains a {type(raw).__name__}")
    return raw


def shipped() -> dict[str, Path]:
    """The configurations included in qkvflow, by name: `quickstart`, `wikitext2/neuralode`, ..."""
    package = Path(__file__).parents[1]
    # An installed wheel has them in the package, a checkout beside it.
    folder = next((p for p in (package / "configs", package.parent / "configs") if p.is_dir()), package)
    return {p.relative_to(folder).with_suffix("").as_posix(): p for p in sorted(folder.rglob("*.yaml"))}


def full_name(path: str) -> str:
    """`configs/NAME.yaml` if the included configuration is read, however its name was spelt; otherwise the path."""
    name = _short(Path(path))
    return path if _on_disk(Path(path)) or name not in shipped() else f"configs/{name}.yaml"


def _found(path: Path) -> Path:
    """The file on disk; if there is none, the included configuration of this name."""
    return path if _on_disk(path) else shipped().get(_short(path), path)


def _on_disk(path: Path) -> bool:
    return path.exists() or path.is_absolute()


def _short(path: Path) -> str:
    return path.as_posix().removeprefix("configs/").removesuffix(".yaml")


def _near_names(path: Path) -> str:
    """What the user may have meant: files of the nearest existing folder and of `configs/`, or what is shipped."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    candidates = {str(p) for root in {folder, Path("configs")} if root.is_dir() for p in root.glob("*.yaml")}
    candidates |= {str(p) for p in Path("configs").glob("*/*.yaml")} if Path("configs").is_dir() else set()
    if not path.is_absolute():
        candidates |= {f"configs/{name}.yaml" for name in shipped()}
    near = difflib.get_close_matches(str(path), sorted(candidates), n=3, cutoff=0.5)
    shown = near or sorted(candidates)[:8]
    if not shown:
        return f" (looked in {os.getcwd()})"
    return f" (looked in {os.getcwd()}); {'similar names' if near else 'available'}: {', '.join(shown)}"
