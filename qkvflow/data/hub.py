"""The Hugging Face hub: tokenizers and models, and an immediate clear error if it cannot be reached."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from qkvflow.errors import Notice, UserError, first_line

_CONNECT_SECONDS = 5.0


def check_dataset_reachable(name: str) -> None:
    """Asks the hub once for the dataset `name`, unless it is a local folder or the hub is switched off.

    `datasets` itself retries for each file, for half a minute and more, before it gives up.

    Raises:
        UserError: the hub cannot be reached. If the hub does not know the dataset, `datasets` decides: it accepts
            more kinds of names.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if Path(name).exists() or constants.HF_HUB_OFFLINE:
        return
    try:
        HfApi().dataset_info(name, timeout=_CONNECT_SECONDS)
    except (HfHubHTTPError, ValueError):
        pass
    except OSError as error:
        raise UserError(
            f"the data set {name!r} cannot be fetched: the Hugging Face hub cannot be reached ({type(error).__name__})."
            " If it is in the local cache, set HF_HUB_OFFLINE=1; otherwise give local files with `data.train` and"
            " `data.validation`."
        ) from error


def download(
    name: str,
    files: Sequence[str],
    is_complete: Callable[[Path], bool],
    what: str,
    instead: str,
    is_enough: Callable[[Path], bool] | None = None,
) -> Path:
    """The local folder with files of the repository `name`, from the hub or its local cache.

    Differs from Levanter, which retries its mirrors and the hub (46 s) before it gives up.

    Args:
        files: names or patterns; those that exist are fetched.
        is_complete: whether a folder of the local cache has what is needed. An interrupted download leaves one, too.
        what, instead: what is requested, and the alternative for the user, for messages.
        is_enough: whether a folder of the local cache that is not complete is taken if the hub cannot be reached.

    Raises:
        UserError: it cannot be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    found: Path | None = None
    wanted = {"allow_patterns": list(files), "etag_timeout": _CONNECT_SECONDS}
    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            found = Path(snapshot_download(name, local_files_only=True, **wanted))
        if found is None or not is_complete(found):
            found = Path(snapshot_download(name, **wanted))
    except (OSError, ValueError) as error:
        reason = first_line(error)
        if found is not None and is_enough is not None and is_enough(found):
            warnings.warn(
                f"the {what} {name!r} is that of the local cache, which may lack files: the Hugging Face hub could not"
                f" be asked for the others ({reason})",
                Notice,
                stacklevel=2,
            )
            return found
        raise UserError(
            f"the {what} {name!r} is not a local folder (current folder: {Path.cwd()}) and could not be fetched from"
            f" the Hugging Face hub ({reason}). {instead}"
        ) from error
    return found


def download_tokenizer(name: str, files: Sequence[str]) -> Path:
    """The local folder with the tokenizer `name` from the hub or its local cache (the `files` that it has).

    Raises:
        UserError: it cannot be fetched or has no `tokenizer.json`.
    """
    instead = "Give a local folder, `tiktoken:gpt2`, or `byte`, which needs no network."

    def is_complete(folder: Path) -> bool:
        return (folder / "tokenizer.json").is_file()

    def is_whole(folder: Path) -> bool:
        """An interrupted download, or a program that needs no more, leaves the first file alone."""
        return is_complete(folder) and (folder / "tokenizer_config.json").is_file()

    found = download(name, files, is_whole, "tokenizer", instead, is_enough=is_complete)
    if not is_complete(found):
        raise UserError(
            f"the Hugging Face repository {name!r} has no tokenizer.json. Convert its tokenizer with "
            "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(folder)) and give that folder."
        )
    return found
