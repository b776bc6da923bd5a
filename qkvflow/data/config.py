"""The `data:` section: Levanter's keys, and shortcuts for local files."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levanter.data.mixture import StopStrategy
from levanter.data.text import (
    ChatLmDatasetFormat,
    ConcatDatasetComponent,
    DatasetComponent,
    DatasetComponentBase,
    LmDataConfig,
    LmDatasetSourceConfigBase,
    TextLmDatasetFormat,
)

from qkvflow.data.control.field import ControlField
from qkvflow.data.control.records import with_control
from qkvflow.data.fingerprint import cache_fingerprint, source_record
from qkvflow.data.formats import DocumentFormat, read_keys
from qkvflow.data.packing import check_pack
from qkvflow.data.resolved import ResolvedDataConfig, datasets
from qkvflow.data.sources import BuiltinSource, FilesSource
from qkvflow.data.tokenizers import limits, resolve_tokenizer, template_fingerprint, tokenizer_fingerprint
from qkvflow.data.unread import check_all_is_read
from qkvflow.errors import UserError
from qkvflow.files import array_path
from qkvflow.ranges import ProperShare, check_ranges


@dataclass(frozen=True)
class DataConfig(LmDataConfig):
    """Levanter's `LmDataConfig` with shortcuts, checked token caches, and defaults that need no file and no network.

    With neither `components` nor `train`, the data is English text that ships with Python.

    Attributes:
        cache_dir: folder for token caches.
        components: Levanter's data components, by name; each has a `source` and its own token cache.
        stop_strategy: for Levanter's mixtures: `restart` starts a finished component again.
        cache_options: Levanter's options for building caches.
        target_budget, experiment_budget: Levanter's, to simulate how often a component of the target is repeated.
        mixture_block_size: sequences in which the weights of a mixture hold.
        max_train_batches: maximum number of batches of each component, by name; all by default.
        validation_fraction: fraction of `train` to hold out if there is no `validation`.
        chat_template: Jinja template for components whose `format: {type: chat}` names none; by default the
            tokenizer's. The run's tokenizer gets it, so that `serve` and `convert --to_hf` have it too.
    """

    tokenizer: str = "byte"
    """`byte`, `tiktoken:NAME`, a local folder, or a name on the Hugging Face hub."""
    train: str | list[str] | None = None
    """Paths or globs of .txt, .jsonl (.gz, .zst), .json or .parquet files; replaces all `components`."""
    validation: str | list[str] | None = None
    """The same for validation. Without it `validation_fraction` of the training data is held out."""
    validation_fraction: ProperShare = 0.1
    text_key: str = "text"
    """The key of a record of `train` and `validation` that holds the text."""
    control_key: str | None = None
    """The key of a record, of any component, that may hold its control: a list of `model.control.dim` numbers."""
    rebuild_caches: bool = False
    """Build token caches again that are damaged, instead of refusing them."""
    verify_caches: bool = False
    """Compare big token caches (beyond 256 MB) with their checksums byte by byte too, not only by sizes."""

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self)
        if self.stop_strategy not in StopStrategy:
            choices = ", ".join(map(str, StopStrategy))
            raise UserError(f"stop_strategy: {self.stop_strategy!r} is not known. Choices: {choices}.")
        if self.validation is not None and self.train is None:
            raise UserError("`validation` is given without `train`: also give `train`.")
        if self.vocab_size is not None:
            raise UserError("`data.vocab_size` has no effect: give `vocab_size`, a key of the whole configuration")

    def control_field(self, dim: int | None) -> ControlField | None:
        """Where records hold the control, for a model with `dim` control components; None without `control_key`.

        Raises:
            UserError: the model has no control (`dim` is None).
        """
        if self.control_key is None:
            return None
        if dim is None:
            raise UserError(
                f"`data.control_key` is {self.control_key!r}, but the model has no control (`model.control` is null)"
                " and would ignore it. Set `model.control: {dim: N}` with `type: neuralode`, or leave the key out."
            )
        return ControlField(self.control_key, dim)

    def check_files(self) -> None:
        """Checks the local files of all components; see `FilesSource.check`."""
        for _, source in _sources(self._with_shortcuts().components):
            if isinstance(source, FilesSource):
                source.check()

    def evaluating(self, validation: str | list[str]) -> "DataConfig":
        """The same data, with other files for evaluation and none for training. They are packed if all texts are."""
        source = FilesSource(validation=_as_list(validation), text_key=self.text_key)
        packs = [] if self.train else list(_packs(self.components))
        same = packs[0] if len(set(map(repr, packs))) == 1 else None  # true is not 1
        return dataclasses.replace(
            self,
            train=None,
            validation=None,
            text_key="text",
            validation_fraction=DataConfig.validation_fraction,
            components={"text": DatasetComponent(source=source, pack=same)},
            train_weights={"text": 0.0},
            max_train_batches=None,
            num_validation_sequences=None,
        )

    def resolve(
        self, tokenizer_folder: Path, control_dim: int | None = None, *, is_training: bool = True
    ) -> ResolvedDataConfig:
        """An ordinary Levanter configuration with the tokenizer in `tokenizer_folder` and safe cache folders.

        Puts the tokenizer into the folder if it is not there yet (`resolve_tokenizer`). Each component's tokens go to
        `<cache_dir>/<component>-<fingerprint>`. The fingerprint covers the tokenizer's content, the format, bos and
        eos, the control and the data, so that a cache never serves the tokens of other data or settings.

        Args:
            control_dim: components of the model's control; None for a model without control.
            is_training: otherwise a tokenizer in the folder is that of a trained model, wherever it came from.

        Raises:
            UserError: errors that can be detected before tokenizing: missing, empty or unreadable files, a tokenizer
                that is not available, components without data, an impossible control, keys that nothing reads.
        """
        plain = self._with_shortcuts()
        if is_training:
            check_all_is_read(plain)
        control = self.control_field(control_dim)
        if self.tokenizer == "passthrough":  # Levanter's name for tokenized data
            raise UserError(
                "`data.tokenizer: passthrough` is not available: a run keeps its tokenizer, with which it is evaluated,"
                " sampled from and converted. Name the tokenizer that made the tokens"
            )
        tokenizer = str(resolve_tokenizer(self.tokenizer, tokenizer_folder, compare=is_training))
        settings = {
            "tokenizer": tokenizer_fingerprint(Path(tokenizer)),
            "enforce_eos": self.enforce_eos,
            "chat_template": self.chat_template,
        }
        if ignored := limits(Path(tokenizer)):  # others keep the names of their caches
            settings["ignored"] = ignored
        template_file = template_fingerprint(Path(tokenizer)) if self.chat_template is None else None
        components = {
            name: _resolve_component(name, component, self.cache_dir, settings, control, template_file)
            for name, component in plain.components.items()
        }
        values = {field.name: getattr(plain, field.name) for field in dataclasses.fields(LmDataConfig)}
        values |= {"tokenizer": tokenizer, "components": components}
        record: dict[str, str] = {}
        for name, source in _sources(plain.components):
            record |= source_record(name, source)
        return ResolvedDataConfig(
            **values,
            control=control,
            record=record,
            rebuild_caches=self.rebuild_caches,
            verify_caches=self.verify_caches,
        )

    def _with_shortcuts(self) -> LmDataConfig:
        """`train` and `validation`, or the built-in text, as components."""
        if self.train is None:
            self._check_shortcuts()
            if self.components:
                return dataclasses.replace(
                    self, components=_without_holdout(self.components, self.num_validation_sequences)
                )
            return dataclasses.replace(self, components={"builtin": DatasetComponent(source=BuiltinSource())})
        validation, sequences = _as_list(self.validation), self._only_text("num_validation_sequences")
        source = FilesSource(
            train=_as_list(self.train),
            validation=validation,
            validation_fraction=0.0 if validation else self.validation_fraction,
            text_key=self.text_key,
        )
        # These settings name components, all of which are replaced.
        return dataclasses.replace(
            self,
            components=_without_holdout({"text": DatasetComponent(source=source)}, sequences),
            train_weights=None,
            max_train_batches=self._only_text("max_train_batches"),
            num_validation_sequences=sequences,
        )

    def _check_shortcuts(self) -> None:
        """Raises:
        UserError: a key that says how `train` is read, without `train`.
        """
        for key in ("text_key", "validation_fraction"):
            if getattr(self, key) != getattr(DataConfig, key):
                what = (
                    f"`components.NAME.source.{key}`" if self.components else "another text: the built-in one is fixed"
                )
                raise UserError(f"`data.{key}` belongs to `data.train`, which is not given: give `train`, or {what}")

    def _only_text(self, key: str) -> dict[str, int] | None:
        """What `max_train_batches` or `num_validation_sequences` says of the text of `train`, which replaces all
        components."""
        given = getattr(self, key) or {}
        unknown = sorted(set(given) - {"text", *self.components})
        if unknown:
            raise UserError(
                f"`data.{key}` has {', '.join(unknown)}, which no component is called: `data.train` is `text`"
            )
        return {name: value for name, value in given.items() if name == "text"} or None


def _without_holdout(
    components: Mapping[str, DatasetComponentBase], sequences: Mapping[str, int] | None
) -> dict[str, DatasetComponentBase]:
    """The components; those that are evaluated on sequences of their training text hold out nothing else.

    Args:
        sequences: `num_validation_sequences`.

    Raises:
        UserError: one of them has validation files, which Levanter would ignore.
    """

    def whole(name: str, component: DatasetComponentBase) -> DatasetComponentBase:
        if isinstance(component, ConcatDatasetComponent):
            children = {child: whole(f"{name}/{child}", part) for child, part in component.children.items()}
            return dataclasses.replace(component, children=children)
        source = component.source if isinstance(component, DatasetComponent) else None
        if not isinstance(source, FilesSource):
            return component
        if source.validation:
            raise UserError(
                f"component {name!r} has validation files, and `num_validation_sequences` evaluates it on sequences of"
                " its training text instead: leave one of them out"
            )
        return dataclasses.replace(component, source=dataclasses.replace(source, validation_fraction=0.0))

    return {name: whole(name, part) if name in (sequences or {}) else part for name, part in components.items()}


def _resolve_component(
    name: str,
    component: DatasetComponentBase,
    cache_dir: str | None,
    settings: dict[str, Any],
    control: ControlField | None,
    template_file: str | None,
) -> DatasetComponentBase:
    if isinstance(component, ConcatDatasetComponent):
        children = {
            child_name: _resolve_component(f"{name}/{child_name}", child, cache_dir, settings, control, template_file)
            for child_name, child in component.children.items()
        }
        return dataclasses.replace(component, children=children)
    if isinstance(component, DatasetComponent):
        check_pack(name, component)
    # Without a source, or with `flat_cache`, the component names an existing cache, which stays unchanged.
    if not isinstance(component, DatasetComponent) or component.source is None or component.flat_cache:
        return component if control is None else with_control(name, component, control)
    if "::" in name:
        raise UserError(f"component {name!r}: a name cannot have `::`, which libraries interpret as two paths")
    base = component.cache_dir or cache_dir
    if base is None:
        raise UserError("`cache_dir` is null; set it to a folder for the tokens")
    base = base if "://" in base else str(array_path(base))
    if component.source.format != TextLmDatasetFormat() or component.source.cache_dir is not None:
        raise UserError(
            f"component {name!r}: `format` and `cache_dir` inside `source` are ignored; write them one level up, under"
            f" `components.{name}`"
        )
    component = _with_text_format(name, component)
    if control is not None:
        component = with_control(name, component, control)
    format = component.format
    if isinstance(format, ChatLmDatasetFormat) and format.chat_template is None:
        # Differs from Levanter, which does not read `data.chat_template`.
        component = dataclasses.replace(
            component, format=dataclasses.replace(format, chat_template=settings["chat_template"])
        )
        settings = settings if template_file is None else settings | {"template_file": template_file}
    if isinstance(component.source, FilesSource):
        component.source.check()
        if component.pack:
            component = dataclasses.replace(component, source=component.source.with_whole_texts())
            settings = settings | {"whole_texts": True} if component.source.whole_texts else settings
    fingerprint = cache_fingerprint(component.source, settings | {"format": repr(component.format)})
    return dataclasses.replace(component, cache_dir=f"{base.rstrip('/')}/{name.replace('/', '-')}-{fingerprint}")


def _with_text_format(name: str, component: DatasetComponent) -> DatasetComponent:
    """Local text gets the format `document`; the text key may be given in the source or in the format."""
    source, format = component.source, component.format
    if not isinstance(source, FilesSource | BuiltinSource):
        return component
    if not isinstance(format, TextLmDatasetFormat):
        if isinstance(source, BuiltinSource):
            raise UserError(f"component {name!r}: the builtin text only has the format text")
        return dataclasses.replace(component, source=source.reading(read_keys(format)))
    if isinstance(source, BuiltinSource):
        return dataclasses.replace(component, format=DocumentFormat())
    keys = {key for key in (source.text_key, format.text_key) if key not in (None, "text")}
    if len(keys) > 1:
        raise UserError(
            f"component {name!r}: the source's text_key is {source.text_key!r} and the format's "
            f"{format.text_key!r}; give it once"
        )
    key = keys.pop() if keys else "text"
    return dataclasses.replace(
        component, source=dataclasses.replace(source, text_key=key), format=DocumentFormat(text_key=key)
    )


def _sources(components: Mapping[str, DatasetComponentBase]) -> Iterator[tuple[str, LmDatasetSourceConfigBase]]:
    """The sources of all components, with the components' names."""
    for name, component in datasets(components):
        if component.source is not None:
            yield name, component.source


def _packs(components: Mapping[str, DatasetComponentBase]) -> Iterator[Any]:
    """`pack` of all components; None for those of another format than text."""
    for _, component in datasets(components):
        yield component.pack if isinstance(component.format, TextLmDatasetFormat) else None


def _as_list(paths: str | list[str] | None) -> list[str]:
    return [] if paths is None else [paths] if isinstance(paths, str) else list(paths)
