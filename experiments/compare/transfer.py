"""Learning rates of widths other than that of the search: transferred by a rule, corrected where its check fails."""

from collections.abc import Hashable, Mapping, Sequence

from experiments.compare.plan import CompareConfig
from experiments.jobs import Arm, Job, Rates
from experiments.search import Tried, best, rounded


def transferred(config: CompareConfig, arms: Sequence[Arm], chosen: Rates) -> Rates:
    """The rate of each variant by the rule, as far as that of its system is known."""
    known = {}
    for arm in arms:
        system, width = arm.what.system, arm.what.width
        rate = chosen.get((system, config.search_width or width))
        if rate is not None or not config.learning_rates:
            known[arm.group] = arm.recipe.rate if rate is None else config.transferred(rate, width)
    return known


def checked(config: CompareConfig, arms: Sequence[Arm]) -> list[tuple[Arm, float]]:
    """The variants whose rates are checked, and the factors."""
    check = config.check_rates
    own = [arm for arm in arms if check and "iso_step" in arm.what.rows and arm.what.system in check.arms]
    return [(arm, factor) for arm in own for factor in (check.factors if check else ())]


def checks(config: CompareConfig, arms: Sequence[Arm], rates: Rates) -> list[Job]:
    """The trainings of the checks, with the first seed of the selection. rates: transferred, as far as known."""
    known = [(arm, factor, rates[arm.group]) for arm, factor in checked(config, arms) if arm.group in rates]
    seed = config.selection_seeds[0]
    return [Job.of(arm, seed, rounded(rate * f) if f != 1.0 else rate, is_reported=False) for arm, f, rate in known]


def unsettled(config: CompareConfig, arms: Sequence[Arm], losses: Mapping[Hashable, Tried]) -> set[str]:
    """The systems whose rates may still be corrected: their check is not whole. losses: as for `corrected`."""
    return {arm.what.system for arm, _ in checked(config, arms) if config.corrects and arm.group not in losses}


def after_check(config: CompareConfig, rate: float, losses: Tried) -> float:
    """The transferred rate, or the best of those checked if its loss is lower by more than the margin."""
    return best(losses) if losses[rate] - min(losses.values()) > config.margin else rate


def corrected(config: CompareConfig, arms: Sequence[Arm], rates: Rates, losses: Mapping[Hashable, Tried]) -> Rates:
    """The rates after the checks: where one fails, those of the system in all widths but that of the search are
    multiplied by the factor that is best, if the checks are to correct. losses: group -> those of its check, once it is
    whole."""
    own = checked(config, arms) if config.corrects else []
    checked_at = {arm.what.system: arm.group for arm, _ in own if arm.group in losses}
    after = {of: after_check(config, rates[of], losses[of]) for of in checked_at.values()}
    found = dict(rates)
    for arm in arms:
        of = checked_at.get(arm.what.system)
        if of is not None and after[of] != rates[of] and arm.group in rates and arm.what.width != config.search_width:
            found[arm.group] = after[of] if arm.group == of else rounded(rates[arm.group] * after[of] / rates[of])
    return found
