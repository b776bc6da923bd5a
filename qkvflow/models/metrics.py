"""What a solve tells of a training step, as metrics: logged as `train/depth_evaluations`, ..."""

from levanter.metrics import Metric, ReductionType

from qkvflow.depth import Solution


def depth_metrics(solution: Solution) -> dict[str, Metric]:
    """Name -> metric, averaged over the parts of a batch: of adaptive steps the evaluations of the field, and the steps
    that were rejected; nothing that the plan says beforehand."""
    statistics = solution.statistics
    if statistics is None:
        return {}
    return {
        "depth_evaluations": Metric.from_value(statistics.evaluations.astype(float), ReductionType.MEAN),
        "depth_rejected_steps": Metric.from_value(statistics.rejected.astype(float), ReductionType.MEAN),
    }
