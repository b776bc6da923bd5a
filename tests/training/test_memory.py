"""Memory and disk that a training needs are those of its precision."""

import pytest
from support.training import Training

from qkvflow.errors import UserError
from qkvflow.training import session


def test_parameters_of_16_bits_take_half(tmp_path, monkeypatch):
    needed = []

    def refuse(trainer, model, Pos, state_bytes, copies):
        needed.append(state_bytes)
        raise UserError("enough seen")

    monkeypatch.setattr(session, "check_memory", refuse)
    for name, mp in (("whole", "f32"), ("half", "p=bf16,c=bf16")):
        with pytest.raises(UserError, match="enough seen"):
            Training(tmp_path).run(name, mp=mp)
    assert needed[1] == pytest.approx(needed[0] / 2, rel=0.01)  # all but the counters of the optimizer
