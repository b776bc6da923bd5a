"""Keys of Levanter's data configuration that nothing reads: a training that gives them is refused."""

from levanter.data.text import DatasetComponent, LmDataConfig

from qkvflow.data.resolved import datasets
from qkvflow.errors import UserError


def check_all_is_read(data: LmDataConfig) -> None:
    """
    Raises:
        UserError: a key is given that neither Levanter nor this library reads; the message says what to give instead.
    """
    if data.permutation_type != LmDataConfig.permutation_type and data.shuffle is not True:
        raise UserError(
            f"`data.permutation_type: {data.permutation_type}` is read with `data.shuffle: true` only. Set that, or"
            " `data.shuffle.perm_type` for a shuffle of blocks"
        )
    for name, component in datasets(data.components):
        if component.split != DatasetComponent.split:
            raise UserError(
                f"component {name!r}: `split: {component.split}` is read by nothing. The split `train` is for training"
                " and `validation` for evaluation: leave `split` out, and name other files in `source`"
            )
        if component.source is not None and component.source.tags is not None:
            whole = name.split("/")[0]  # parts of a joined component have no tags of their own
            raise UserError(
                f"component {name!r}: `tags` inside `source` are ignored; write them one level up, under"
                f" `components.{whole}`"
            )
