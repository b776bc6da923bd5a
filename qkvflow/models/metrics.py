"""What an adaptive solve cost, as metrics of a training step: logged as `train/depth_evaluations`, ..."""

from levanter.metrics import Metric, ReductionType

from qkvflow.depth import Statistics


def depth_metrics(statistics: Statistics) -> dict[str, Metric]:
    """Name -> metric, averaged over the parts of a batch: evaluations of the field, and steps that were rejected."""
    return {
        "depth_evaluations": Metric.from_value(statistics.evaluations.astype(float), ReductionType.MEAN),
        "depth_rejected_steps": Metric.from_value(statistics.rejected.astype(float), ReductionType.MEAN),
    }
