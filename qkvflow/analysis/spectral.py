"""Spectra over layer-time: eigenvalues of QK, OV and FF, complex, at the times of training or any others.

    qkvflow spectral --run runs/quickstart

writes eigenvalues, singular values and their summaries, with a band from untrained models, to `<run>/analysis/`, as
`spectral.npz` and figures (PNG and PDF). With `--text`, also the eigenvalues of the field's Jacobian on that text.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
from haliax import NamedArray
from levanter.models.lm_model import LmHeadModel

from qkvflow.analysis import figures, spectrum
from qkvflow.analysis.exponents import Tick
from qkvflow.analysis.many import each
from qkvflow.analysis.matrices import FAMILIES, ThinProduct, check_family, factors, products, thin
from qkvflow.analysis.matrices import official_times as official_times
from qkvflow.analysis.matrices import training_times as training_times
from qkvflow.analysis.opening import opened, output_folder, texts_of, write
from qkvflow.analysis.reading import Reading, position_in, read, sequence
from qkvflow.analysis.spectrum import Summary
from qkvflow.analysis.tangent import Tangent
from qkvflow.blocks import SsmBlockConfig
from qkvflow.cli import run_program
from qkvflow.config import Text
from qkvflow.errors import UserError
from qkvflow.models.levanter_twin import enter_config
from qkvflow.runs import load_run
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.runs.load import find_run


def qk_eigenvalues(model: LmHeadModel, times=None) -> np.ndarray:
    """Non-zero eigenvalues of W_Q^h (W_K^h)^T, complex128 [time, heads, head_size], by decreasing modulus.

    Args:
        times: numbers in [0, 1]; the training times by default. See `qkvflow.analysis.matrices` for what is left out.
    """
    return eigenvalues(model, "qk", times)


def ov_eigenvalues(model: LmHeadModel, times=None) -> np.ndarray:
    """Non-zero eigenvalues of W_V^h W_O^h, complex128 [time, heads, head_size], by decreasing modulus."""
    return eigenvalues(model, "ov", times)


def ff_eigenvalues(model: LmHeadModel, times=None) -> np.ndarray:
    """Eigenvalues of W_1 W_2, the MLP without its nonlinearity, complex128 [time, embed], by decreasing modulus."""
    return eigenvalues(model, "ff", times)


def eigenvalues(model: LmHeadModel, family: str, times=None) -> np.ndarray:
    """The eigenvalues of `family` (`qk`, `ov`, `ff`): see the functions above."""
    return eigenvalues_of(products(model, family, times), family)


def singular_values(model: LmHeadModel, family: str, times=None) -> np.ndarray:
    """Singular values of the same matrices, float64, descending: [time, heads, head_size], for `ff` [time, embed]."""
    return spectrum.singular_values(products(model, family, times))


def summary(model: LmHeadModel, family: str, times=None) -> Summary:
    """Radius, signs, real and imaginary parts, norm and symmetry of the matrices: each [time, heads], `ff`: [time]."""
    return _summary(products(model, family, times), family)


def random_summaries(model: LmHeadModel, family: str, times=None, *, draws: int = 5, seed: int = 0) -> Summary:
    """`summary` of untrained models with the same configuration: each field [draws, time, heads].

    Only the requested matrices are drawn. Values outside this band are an effect of training.
    """
    return summaries_of(random_products(model, family, times, draws=draws, seed=seed), family)


def random_products(model: LmHeadModel, family: str, times=None, *, draws: int = 5, seed: int = 0) -> list[ThinProduct]:
    """`products` of untrained models with the same configuration; only the requested matrices are drawn."""
    if draws < 1:
        raise UserError(f"draws must be at least 1, got {draws}.")
    times = training_times(model) if times is None else times

    @eqx.filter_jit
    def draw(key):
        return factors(model.config.build(model.Vocab, key=key), family, times)

    return [thin(*draw(key)) for key in jax.random.split(jax.random.PRNGKey(seed), draws)]


def summaries_of(several: Sequence[ThinProduct], family: str) -> Summary:
    """The summaries of several models' products, each field [model, time, heads]."""
    results = [_summary(product, family) for product in several]
    return Summary(**{f.name: np.stack([getattr(r, f.name) for r in results]) for f in fields(Summary)})


def eigenvalues_of(product: ThinProduct, family: str) -> np.ndarray:
    """`eigenvalues` of products that are already computed."""
    return spectrum.eigenvalues(product, _count(product, family))


def jacobian_eigenvalues(model: LmHeadModel | Reading, tokens, position: int = -1) -> np.ndarray:
    """Eigenvalues of d F_n(x)_j / d x_j at the states of a text, complex128 [steps, embed], by decreasing modulus.

    F is the whole vector field, with norms and nonlinearities; of a solver with several stages, what a step adds,
    divided by its length h. j is `position`. Positive real parts push states of this token apart; negative real parts
    contract them. A step of length h is I + h J.
    """
    reading = model if isinstance(model, Reading) else read(model)
    tangent = Tangent(reading, sequence(reading, tokens))
    j = position_in("position", position, tangent.shape[0])
    blocks = [np.asarray(tangent.jacobian_rows(n, j)[:, j], np.float64) for n in range(tangent.steps)]
    return spectrum.sort(each(np.linalg.eigvals, np.stack(blocks) / reading.step))


@dataclass(frozen=True)
class OverTraining:
    """Spectra at the checkpoints of a run.

    Attributes:
        steps: of the checkpoints, ascending.
        times: layer-times.
        eigenvalues: complex128 {checkpoints, times, [heads,] eigenvalues}, by decreasing modulus.
    """

    steps: tuple[int, ...]
    times: tuple[float, ...]
    eigenvalues: NamedArray


def over_training(
    run: str | Path, family: str, times=None, *, steps: Sequence[int] | None = None, tick: Tick | None = None
) -> OverTraining:
    """Eigenvalues of `family` (`qk`, `ov`, `ff`) at each checkpoint of a run.

    Args:
        run: its directory.
        times: as in `qk_eigenvalues`.
        steps: of the checkpoints to use; all by default.

    Raises:
        UserError: no such run, no checkpoints, unknown steps, or a family or times that the model does not have.
    """
    check_family(family)
    directory = find_run(run)
    steps = checkpoint_steps(directory.checkpoints) if steps is None else steps
    if not steps:
        raise UserError(f"{run} has no checkpoints. Set trainer.checkpointer.keep to keep some during training.")
    values, at = [], times
    for done, step in enumerate(sorted(steps, reverse=True)):  # the depth may have grown: the times are the newest's
        model = load_run(run, step).model
        at = training_times(model) if at is None else at
        values.insert(0, eigenvalues(model, family, at))
        if tick is not None:
            tick(done + 1, len(steps))
    heads = ("heads",) if values[0].ndim == 3 else ()
    names = ("checkpoints", "times", *heads, "eigenvalues")
    times = () if at is None else tuple(map(float, at))
    return OverTraining(tuple(sorted(steps)), times, NamedArray(np.stack(values), names))


@dataclass
class SpectralConfig:
    """
    Attributes:
        run: the run directory, or a Hugging Face folder.
        checkpoint_step: N of the checkpoint step-N; the newest by default.
        times: layer-times, `0,0.5,1`, or a number of times spread over [0, 1]; the training times by default.
        text: also compute the eigenvalues of the field's Jacobian at the states of this text, at its last token.
        draws: number of untrained models to compare with; 0 for none.
        out: output folder; `<run>/analysis` by default.
        control: control signal for the states of `text`, `[0, 1]`; zero by default.
    """

    run: str
    checkpoint_step: int | None = None
    times: int | float | str | list[float] | None = None
    text: Text | None = None
    draws: int = 5
    out: str | None = None
    control: list[float] | None = None


def main(config: SpectralConfig) -> dict[str, np.ndarray]:
    """Computes, writes and prints; returns the contents of `spectral.npz`."""
    if config.draws < 0:
        raise UserError(f"draws must be at least 0, got {config.draws}")
    if config.control is not None and config.text is None:
        raise UserError("control only affects the states of a text, not the spectra of weights: also give --text")
    times = times_of(config.times)
    with opened(config.run, config.checkpoint_step) as (run, progress):
        model, folder = run.model, output_folder(run, config.out)
        times = training_times(model) if times is None else times
        kinds = families(model)
        reading, texts = texts_of(run, [config.text], control=config.control) if config.text is not None else (None, [])
        thin = {kind: products(model, kind, times) for kind in kinds}  # rejects bad times before the work begins
        arrays: dict[str, np.ndarray] = {"times": np.asarray(times)}
        values, singular, own, bands, clouds = {}, {}, {}, {}, {}
        with progress.count("Eigenvalues") as tick:
            for done, (kind, product) in enumerate(thin.items()):
                values[kind] = eigenvalues_of(product, kind)
                singular[kind] = spectrum.singular_values(product)
                own[kind] = spectrum.summary(values[kind], singular[kind])
                tick(done + 1, len(thin))
        if config.draws:
            with progress.count("Fresh models") as tick:
                for done, kind in enumerate(kinds):
                    fresh = random_products(model, kind, times, draws=config.draws)
                    bands[kind], clouds[kind] = summaries_of(fresh, kind), eigenvalues_of(fresh[0], kind)
                    tick(done + 1, len(kinds))
        for kind in kinds:
            arrays |= {f"{kind}_eigenvalues": values[kind], f"{kind}_singular_values": singular[kind]}
            arrays |= {f"{kind}_{name}": array for name, array in asdict(own[kind]).items()}
            if config.draws:
                arrays |= {f"{kind}_untrained_{name}": array for name, array in asdict(bands[kind]).items()}
                arrays[f"{kind}_untrained_eigenvalues"] = clouds[kind]
        drawn = {
            "eigenvalues": figures.eigenvalues(times, values, clouds or None),
            "summary": figures.summaries(times, own, bands or None),
            "singular-values": figures.singular_values(times, singular),
        }
        if reading is not None:
            with progress.phase("Jacobian of the field"):
                arrays["jacobian_eigenvalues"] = jacobian_eigenvalues(reading, texts[0].ids)
                arrays["jacobian_times"] = np.asarray(reading.times)
                arrays["tokens"] = texts[0].ids
            drawn["jacobian"] = figures.eigenvalues(reading.times, {"jacobian": arrays["jacobian_eigenvalues"]})
        write(folder, "spectral", arrays, drawn)
    print(_table(times, own))
    print(f"Written to {folder}: spectral.npz, " + ", ".join(f"spectral-{name}.png, .pdf" for name in drawn))
    return arrays


def families(model: LmHeadModel) -> tuple[str, ...]:
    """The families among `qk`, `ov`, `ff` that the model has: a state-space block has no `ff`."""
    return FAMILIES[:2] if isinstance(enter_config(model.config).block, SsmBlockConfig) else FAMILIES


def _summary(product: ThinProduct, family: str) -> Summary:
    return spectrum.summary(eigenvalues_of(product, family), spectrum.singular_values(product))


def _count(product: ThinProduct, family: str) -> int:
    """The number of eigenvalues to show: for `ff`, the dimension of the state."""
    embed, inner = product.left.shape[-2:]
    return embed if family == "ff" else min(embed, inner)


def _table(times, summaries: dict[str, Summary]) -> str:
    lines = [f"{'':<4}{'t':>7}{'radius':>10}{'Re > 0':>9}{'symmetric':>11}   (median over heads)"]
    for kind, own in summaries.items():
        for i, t in enumerate(times):
            row = (float(np.median(x[i])) for x in (own.radius, own.positive, own.symmetric))
            lines.append("{:<4}{:>7.3f}{:>10.4f}{:>9.2f}{:>11.3f}".format(kind, t, *row))
    return "\n".join(lines)


def times_of(value) -> tuple[float, ...] | None:
    """Layer-times from an option: `0,0.5,1`, or a number of times spread over [0, 1]; None for None.

    Raises:
        UserError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, int):
        if value < 2:
            raise UserError(f"times: a number of times must be at least 2, got {value}; write one time as 0.5")
        return tuple(np.linspace(0.0, 1.0, value).tolist())
    items = value if isinstance(value, list) else str(value).split(",")
    try:
        return tuple(float(item) for item in items)
    except ValueError:
        raise UserError(
            f"times must be numbers in [0, 1] such as 0,0.5,1, or a number of them; got {value!r}"
        ) from None


if __name__ == "__main__":
    run_program(main, SpectralConfig)
