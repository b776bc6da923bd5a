"""Reading text files record by record: .txt as one document, .jsonl, .json and .parquet as many."""

import codecs
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from qkvflow.data.control.field import ControlField
from qkvflow.data.pieces import PIECE_CHARACTERS, cut
from qkvflow.errors import UserError

ENDINGS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")
# Keys of a record that is a piece of a longer document.
BEGINS, ENDS = "document_begins", "document_ends"
_BLOCK_BYTES = 1 << 20


def is_plain_text(path: Path) -> bool:
    """Whether the whole file is one document."""
    return path.name.lower().endswith(".txt")


def read_text(
    path: Path, text_key: str, start: int = 0, stop: int | None = None, *, whole: bool = False
) -> Iterator[dict[str, Any]]:
    """One document (bytes `start` to `stop` of the file) as pieces `{text_key, BEGINS, ENDS}`, streamed.

    Line endings stay unchanged; a byte order mark at the start of the file is left out.

    Args:
        whole: as a single piece.

    Raises:
        UserError: the file is not UTF-8; the message gives the byte offset.
    """
    blocks = _decoded_blocks(path, start, stop)
    if whole:
        if text := "".join(blocks):
            yield {text_key: text, BEGINS: True, ENDS: True}
        return
    begins, pending = True, ""
    for block in blocks:
        pending += block
        while len(pending) > PIECE_CHARACTERS:
            place = cut(pending, PIECE_CHARACTERS)
            yield {text_key: pending[:place], BEGINS: begins, ENDS: False}
            begins, pending = False, pending[place:]
    if pending:
        yield {text_key: pending, BEGINS: begins, ENDS: True}


def _decoded_blocks(path: Path, start: int, stop: int | None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        position = start
        file.seek(start)
        while True:
            size = _BLOCK_BYTES if stop is None else min(_BLOCK_BYTES, stop - position)
            block = file.read(size)
            kept = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, position - kept + error.start, "") from error
            yield text.removeprefix("\ufeff") if position == 0 else text
            position += len(block)
            if not block:
                return


def read_records(path: Path, text_key: str | None, control: ControlField | None = None) -> Iterator[dict[str, Any]]:
    """The records of a .jsonl (also .gz, .zst), .json or .parquet file.

    With `text_key` each record is reduced to `{text_key: text}`, plus its control (fp32 [dim]) if `control` is given;
    with None whole records are returned.

    Raises:
        UserError: broken content, a record without text, an incomplete character, or an invalid control; the message
            gives file and line (or record).
    """
    for where, record in _records(path, text_key, control):
        if not isinstance(record, dict):
            raise UserError(f"{where}: a record must be an object with keys, but is {type(record).__name__}")
        if text_key is None:
            _check_characters(json.dumps(record, ensure_ascii=False, default=str), where)
            yield record
            continue
        if text_key not in record:
            raise UserError(_no_text(where, text_key, list(record)))
        if not isinstance(record[text_key], str):
            kind = type(record[text_key]).__name__
            raise UserError(f"{where}: the key {text_key!r} must hold text, but holds {kind}")
        _check_characters(record[text_key], where)
        kept = {text_key: record[text_key]}
        if control is not None:
            kept[control.key] = control.read(record, where)
        yield kept


def _check_characters(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(
            f"{where}: {half} is half of a character (a lone UTF-16 surrogate), not text. Remove it, or write the whole"
            " character"
        ) from None


def _records(path: Path, text_key: str | None, control: ControlField | None) -> Iterator[tuple[str, Any]]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from _parquet_records(path, text_key, control)
    elif name.endswith(".json") and _first_character(path) == "[":
        content = path.read_bytes()
        try:
            records = json.loads(content.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error.start, "") from error
        except (ValueError, RecursionError) as error:
            raise _broken_json(path, _line_of(error, content), error) from error
        yield from ((f"{path}, record {number}", record) for number, record in enumerate(records, 1))
    else:
        yield from _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Differs from Levanter's reader: blank lines are skipped and errors name the line."""
    try:
        with _decompressed(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield f"{path}:{number}", json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, error.start, f" of line {number}") from error
                except (ValueError, RecursionError) as error:
                    raise _broken_json(path, number, error) from error
    except (EOFError, OSError, zlib.error, _zstd_error()) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _decompressed(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return gzip.open(path)
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(_ZstdFile(path))
    return path.open("rb")


class _ZstdFile(io.RawIOBase):
    """The content of all frames of a .zst file. zstandard's own reader does not tell where the last one is cut off."""

    def __init__(self, path: Path):
        import zstandard

        self._decompressor = zstandard.ZstdDecompressor()
        self._file, self._frame, self._pending = path.open("rb"), None, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            block = self._file.read(_BLOCK_BYTES // 8)
            if not block:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of its compressed content: it was cut off")
                return 0
            self._pending = memoryview(b"".join(self._content(block)))
        count = min(len(buffer), len(self._pending))
        buffer[:count], self._pending = self._pending[:count], self._pending[count:]
        return count

    def _content(self, block: bytes) -> Iterator[bytes]:
        """Of a block of the file, in which frames may end and begin."""
        while block:
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            yield self._frame.decompress(block)
            block = b""
            if self._frame.eof:
                block, self._frame = self._frame.unused_data, None

    def close(self) -> None:
        self._file.close()
        super().close()


def _parquet_records(path: Path, text_key: str | None, control: ControlField | None) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        if text_key is not None and text_key not in file.schema_arrow.names:
            raise UserError(_no_text(str(path), text_key, file.schema_arrow.names))
        columns = None if text_key is None else [text_key]
        if columns is not None and control is not None and control.key in file.schema_arrow.names:
            columns.append(control.key)
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}, record {number}", record
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise UserError(f"{path} is not a readable parquet file: {error}") from error


def _first_character(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1].decode("latin-1")


def _zstd_error() -> type[Exception]:
    try:
        import zstandard
    except ImportError:
        return EOFError
    return zstandard.ZstdError


def _no_text(where: str, text_key: str, found: list[str]) -> str:
    return (
        f"{where} has no key {text_key!r}; keys found: {', '.join(map(str, found)) or 'none'}. "
        "Name the key that holds the text with `text_key`."
    )


def _broken_json(path: Path, line: int, error: ValueError | RecursionError) -> UserError:
    if not isinstance(error, json.JSONDecodeError | RecursionError):  # Python's limit of digits
        digits = sys.get_int_max_str_digits()
        return UserError(
            f"{path}:{line}: a whole number has more than {digits:,} digits. Shorten it, or put it in quotes"
        )
    why = "nested too deeply" if isinstance(error, RecursionError) else f"{error.msg}, column {error.colno}"
    return UserError(f"{path}:{line}: not valid JSON ({why})")


def _line_of(error: ValueError | RecursionError, content: bytes) -> int:
    """The line of a file where its parser gave up; the first one if that is not known."""
    if isinstance(error, json.JSONDecodeError):
        return error.lineno
    number = re.search(rb"[0-9]{%d}" % (sys.get_int_max_str_digits() + 1), content)
    return 1 if isinstance(error, RecursionError) or number is None else content.count(b"\n", 0, number.start()) + 1


def _not_utf8(path: Path, offset: int, of_what: str) -> UserError:
    return UserError(
        f"{path} is not UTF-8 text: the byte at offset {offset}{of_what} cannot be decoded. "
        "Convert the file, for example with: iconv -f ENCODING -t UTF-8."
    )
