"""Building and loading token caches: complete or absent, one builder at a time, clear errors."""

import contextlib
import itertools
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
from jinja2 import TemplateError
from levanter.data import BatchProcessor
from levanter.data.sharded_datasource import ShardedDataSource
from levanter.data.text import HfDatasetSourceConfig, LmDatasetSourceConfigBase
from levanter.store.cache import CacheMetadata, CacheOptions, SerialCacheWriter, TreeCache, build_cache

from qkvflow.data import soundness
from qkvflow.data.control.records import ControlledTokenizer
from qkvflow.data.hub import check_dataset_reachable
from qkvflow.data.sources import BuiltinSource, FilesSource
from qkvflow.errors import UserError, first_line
from qkvflow.files import says_disk_is_full
from qkvflow.locks import locked

logger = logging.getLogger(__name__)

# Appending rewrites the open end of the store, so few large writes are much faster than many small ones.
_TOKENS_PER_WRITE = 1 << 23
_CHARACTERS_PER_BATCH = 1 << 20
_FULL_DISK_BYTES = 1 << 20
_UNFIT = (KeyError, ValueError, TypeError, TemplateError)  # what formats raise for a record that they cannot read


def load_or_build(
    folder: Path,
    split: str,
    source: LmDatasetSourceConfigBase,
    processor: BatchProcessor[dict, dict],
    options: CacheOptions,
    *,
    build: bool = True,
    rebuild: bool = False,
    verify: bool = False,
) -> TreeCache[dict] | None:
    """The token cache `folder/split`, built first if missing; None if the source has no such split.

    Differs from Levanter: a cache only gets its name when it is complete, so that the remains of a killed process are
    never read; a finished cache is read without its source (which may need a network); and local text, and text with
    control, is tokenized in this process, so that errors name the file and line.

    Args:
        build: if false, a missing cache is an error.
        rebuild: rebuild a damaged cache.
        verify: also compare a large cache with its checksums byte by byte.

    Raises:
        UserError: the source cannot be read, the folder cannot be written, or the cache is damaged.
    """
    target, absent = folder / split, folder / f"{split}.absent"

    def is_there() -> bool:
        return absent.is_file() or (
            _is_finished(target) and not (rebuild and soundness.damage(target, whole=verify) is not None)
        )

    if not is_there():
        if not build:
            raise UserError(
                f"there is no token cache {target}, and `data.auto_build_caches` is false: set it to true, or name an"
                " existing cache"
            )
        with _lock(folder, split):
            # Another process may have built it while this one waited.
            if not is_there():
                shards = open_source(source, split)
                if shards is None:
                    absent.touch()
                else:
                    # Each process of a run in a folder of its own, where file locks do not reach other machines.
                    own = f".{jax.process_index()}" if jax.process_index() else ""
                    _build(folder / f"{split}.building{own}", target, source, shards, processor, options, verify)
    if absent.is_file():
        return None
    what = soundness.damage(target, whole=verify)
    if what is not None:
        raise soundness.refusal(target, what)
    # Levanter would compare metadata here and only warn; the folder's name identifies the tokens.
    try:
        cache = TreeCache.load(str(target), processor.output_exemplar)
        soundness.check_counts(target, cache)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise soundness.refusal(target, first_line(error)) from error
    return cache


def _build(
    building: Path,
    target: Path,
    source: LmDatasetSourceConfigBase,
    shards: ShardedDataSource[dict],
    processor: BatchProcessor[dict, dict],
    options: CacheOptions,
    verify: bool,
) -> None:
    logger.info("Tokenising into %s", target)
    metadata = CacheMetadata(preprocessor_metadata=processor.metadata)
    is_local = isinstance(source, FilesSource | BuiltinSource)
    if not is_local:
        _try_first_record(shards, processor)
    if is_local or isinstance(processor, ControlledTokenizer):
        shutil.rmtree(building, ignore_errors=True)
        try:
            _write_tokens(building, shards, processor, metadata)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    else:
        # Finished shards of an interrupted build are reused; data derived from them may be incomplete.
        for entry in building.iterdir() if building.is_dir() else ():
            if not _is_shard(entry):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        try:
            build_cache(str(building), shards, processor, options, metadata)
        except RuntimeError as error:  # of a worker, whose own error is only text in it
            if not says_disk_is_full(error):
                _tell_unfit_record(building, shards, processor)
            raise
        for entry in filter(_is_shard, [*building.iterdir()]):
            shutil.rmtree(entry)  # the joined arrays contain all of it
    soundness.seal(building)
    if not _is_good(target, verify):
        shutil.rmtree(target, ignore_errors=True)
        try:
            building.rename(target)
            return
        except OSError:
            if not _is_good(target, verify):
                raise
    shutil.rmtree(building)  # another process was first


def _is_good(target: Path, verify: bool) -> bool:
    return _is_finished(target) and soundness.damage(target, whole=verify) is None


def _write_tokens(
    building: Path,
    shards: ShardedDataSource[dict],
    processor: BatchProcessor[dict, dict],
    metadata: CacheMetadata,
) -> None:
    """Writes all shards in order to one store, in bounded memory."""
    with SerialCacheWriter(str(building), processor.output_exemplar, metadata) as writer:
        rows: list[dict] = []
        size, done = 0, 0  # tokens in `rows`; records before the batch
        for batch in _batches(shards):
            try:
                new = list(processor(batch))
            except _UNFIT as error:
                raise _unfit(batch, processor, done, error) from error
            done += len(batch)
            rows += new
            size += sum(max(len(values) for values in row.values()) for row in new)
            if size >= _TOKENS_PER_WRITE:
                writer.write_batch(rows)
                rows, size = [], 0
        if rows:
            writer.write_batch(rows)


def _batches(shards: ShardedDataSource[dict]) -> Iterator[list[dict]]:
    """Records in groups of about a million characters: enough for parallel tokenization."""
    batch: list[dict] = []
    size = 0
    for record in shards:
        batch.append(record)
        size += sum(len(value) for value in record.values() if isinstance(value, str)) + 1
        if size >= _CHARACTERS_PER_BATCH or len(batch) >= 4096:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def open_source(source: LmDatasetSourceConfigBase, split: str) -> ShardedDataSource[dict] | None:
    """The records of a split; None if the source has none for it.

    Raises:
        UserError: it cannot be opened.
    """
    try:
        if isinstance(source, HfDatasetSourceConfig):
            check_dataset_reachable(source.id)
        return source.get_shard_source(split)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        name = getattr(source, "id", None) or type(source).__name__
        reason, advice = first_line(error), "Check its name and the network"
        if "Dataset scripts" in reason:
            advice = "Add `revision: refs/convert/parquet` to its source, where the hub keeps a copy without a script"
        raise UserError(
            f"the {split} data of {name!r} cannot be opened: {reason}. {advice}, or give local files with `data.train`"
            " and `data.validation`."
        ) from error


def _try_first_record(shards: ShardedDataSource[dict], processor: BatchProcessor[dict, dict]) -> None:
    """Differs from Levanter, whose workers report a missing key after three attempts, with a long traceback."""
    try:
        record = next(iter(shards), None)
    except (ValueError, KeyError) as error:
        raise _unreadable(1, "the data", error) from error
    if record is None:
        return
    try:
        processor([record])
    except _UNFIT as error:
        raise _unfit([record], processor, 0, error) from error


def _tell_unfit_record(building: Path, shards: ShardedDataSource[dict], processor: BatchProcessor[dict, dict]) -> None:
    """Reads the shards that workers have not finished, up to the first record that ended one.

    Raises:
        UserError: there is one.
    """
    finished = {int(entry.name[:5]) for entry in building.iterdir() if _is_shard(entry)} if building.is_dir() else set()
    for index, name in enumerate(shards.shard_names):
        if index in finished:
            continue
        where, records = f"the data, part {name!r},", iter(shards.open_shard_at_row(name, 0))
        for number in itertools.count(1):
            try:
                record = next(records)
            except StopIteration:
                break
            except Exception as error:  # readers raise what their libraries do
                raise _unreadable(number, where, error) from error
            try:
                processor([record])
            except _UNFIT as error:
                raise _unfit([record], processor, number - 1, error, where) from error


def _unreadable(number: int, where: str, error: Exception) -> UserError:
    return UserError(f"record {number} of {where} cannot be read: {first_line(error)}. Correct it, or remove it.")


def _unfit(
    batch: list[dict],
    processor: BatchProcessor[dict, dict],
    done: int,
    error: Exception,
    where: str = "the data",
) -> UserError:
    """What to tell of a batch that has a record which the component's format cannot read.

    Args:
        done: records before the batch.
        where: that they are records of.
    """
    place = 0
    for i, record in enumerate(batch):
        try:
            processor([record])
        except _UNFIT as own:
            place, error = i, own
            break
    if isinstance(error, UserError):  # which says more
        return error
    number, keys = done + place + 1, ", ".join(map(str, batch[place]))
    if isinstance(error, KeyError):
        return UserError(
            f"record {number} of {where} has no key {error}; keys found: {keys}. Name the keys that it has in the"
            " component's `format`: for text `{type: text, text_key: NAME}`."
        )
    return UserError(
        f"record {number} of {where} (keys: {keys}) does not fit the component's `format`: {first_line(error)}"
    )


def _is_finished(cache: Path) -> bool:
    try:
        ledger = json.loads((cache / soundness.LEDGER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(ledger, dict) and bool(ledger.get("is_finished"))


def _is_shard(entry: Path) -> bool:
    return re.match(r"\d{5}_", entry.name) is not None and (entry / soundness.LEDGER).is_file()


@contextlib.contextmanager
def _lock(folder: Path, split: str) -> Iterator[None]:
    """Held by one process at a time, also within a run; the kernel releases it when the process ends."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # On a file system without locks, the first process of a run to finish is the one whose cache is used.
            stack.enter_context(locked(folder / f"{split}.lock", wait=True))
        except OSError as error:
            raise UserError(
                f"the token cache {folder} is not finished and cannot be written: {error.strerror or error}. Set"
                " `data.cache_dir` to a writable folder; a finished cache may be read-only."
            ) from error
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            # The store reports a full disk by many different errors, and what it has written may be gone already.
            if says_disk_is_full(error) or shutil.disk_usage(folder).free < _FULL_DISK_BYTES:
                raise UserError(
                    f"the disk with the token cache {folder} is full; free some space or change `data.cache_dir`"
                ) from error
            raise
