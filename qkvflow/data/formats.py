"""How documents become tokens: `format: {type: document}`, Levanter's text format without side effects."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from levanter.data import BatchProcessor
from levanter.data.text import (
    ChatLmDatasetFormat,
    LmDatasetFormatBase,
    PrebuiltLmDatasetFormat,
    SupervisedLmDatasetFormat,
    TextLmDatasetFormat,
)
from levanter.tokenizers import MarinTokenizer

from qkvflow.data.pieces import pieces
from qkvflow.data.readers import BEGINS, ENDS

_CHARACTERS_AT_ONCE = 1 << 20


@LmDatasetFormatBase.register_subclass("document")
@dataclass(frozen=True)
class DocumentFormat(TextLmDatasetFormat):
    """Text whose token sequence ends with the end-of-text token.

    Differs from Levanter's `text`, which tokenizes `text + " " + eos`: no space token is added to the document, and a
    text of any length is tokenized in bounded memory (`qkvflow.data.pieces`).
    """

    def build_preprocessor(
        self, tokenizer: MarinTokenizer, *, enforce_eos: bool = True, enforce_bos: bool = True
    ) -> BatchProcessor[dict, dict]:
        return DocumentTokenizer(tokenizer, self.text_key, enforce_bos=enforce_bos, enforce_eos=enforce_eos)


class DocumentTokenizer(BatchProcessor[dict, dict]):
    """Records `{text_key: text}` to `{"input_ids": int32 [tokens]}`: bos (if there is one), text, eos.

    A record with `document_begins` or `document_ends` false is a piece of a longer document and gets no bos or eos on
    that side; the pieces follow each other in the token stream in the order of the document's text.
    """

    def __init__(self, tokenizer: MarinTokenizer, text_key: str, *, enforce_bos: bool, enforce_eos: bool):
        self.tokenizer = tokenizer
        self.text_key = text_key
        self._bos = [tokenizer.bos_token_id] if enforce_bos and tokenizer.bos_token_id is not None else []
        self._eos = [tokenizer.eos_token_id] if enforce_eos and tokenizer.eos_token_id is not None else []

    def __call__(self, batch: Sequence[dict]) -> Sequence[dict]:
        split = [list(pieces(record[self.text_key])) for record in batch]
        encoded = self._encoded(piece for parts in split for piece in parts)
        rows = []
        for record, parts in zip(batch, split, strict=True):
            ids = list(self._bos) if record.get(BEGINS, True) else []
            for _ in parts:
                ids.extend(next(encoded))
            if record.get(ENDS, True):
                ids.extend(self._eos)
            rows.append({"input_ids": np.asarray(ids, dtype=np.int32)})
        return rows

    def _encoded(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """The tokens of each piece, some pieces at once: a result is 90 times as large as its text."""
        group: list[str] = []
        size = 0
        for text in texts:
            group.append(text)
            size += len(text)
            if size >= _CHARACTERS_AT_ONCE:
                yield from self.tokenizer.encode_batch(group)
                group, size = [], 0
        yield from self.tokenizer.encode_batch(group)

    @property
    def output_exemplar(self) -> dict[str, Any]:
        return {"input_ids": np.zeros((0,), dtype=np.int32)}

    @property
    def num_cpus(self) -> int:
        return 1

    @property
    def metadata(self) -> dict[str, Any]:
        # The tokenizer's folder is left out: it differs between runs while its content is the same.
        return {"vocab_size": self.tokenizer.vocab_size, "bos": self._bos, "eos": self._eos}


def unmasked(format: LmDatasetFormatBase, tokenizer: MarinTokenizer) -> LmDatasetFormatBase:
    """The format. That of chats with `mask_user_turns: false` gets a template all of whose text counts as an answer.

    Differs from Levanter, which wants an answer in each chat, between `{% generation %}` and `{% endgeneration %}`,
    even where nothing reads the mask: most models' templates have no such tags. The tokens are the same.
    """
    if not isinstance(format, ChatLmDatasetFormat) or format.mask_user_turns:
        return format
    template = format.chat_template or tokenizer.chat_template
    if template is None:
        return format
    # `+` keeps the white space beside a tag. At the end of a template Jinja drops one line break.
    whole = "{% generation +%}" + template.removesuffix("\n") + "{%+ endgeneration %}"
    return dataclasses.replace(format, chat_template=whole)


def read_keys(format: LmDatasetFormatBase) -> tuple[str, ...]:
    """The keys of a record that a format reads; empty for a format that is not known here."""
    match format:
        case TextLmDatasetFormat():
            keys = [format.text_key]
        case SupervisedLmDatasetFormat():
            keys = [format.input_key, format.target_key]
        case ChatLmDatasetFormat():
            keys = [format.messages_field, format.system_prompt, format.chat_template_kwargs]
        case PrebuiltLmDatasetFormat():
            keys = [format.input_ids_key, format.loss_weights_key]
        case _:
            keys = []
    return tuple(key for key in keys if key is not None)
