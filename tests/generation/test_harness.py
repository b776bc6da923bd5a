"""What a task of lm-evaluation-harness becomes, without the harness: prompts, lengths, seeds."""

import importlib
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest

from qkvflow.errors import Notice, UserError
from qkvflow.generation.sampling import SamplingOptions


@pytest.fixture
def harness(monkeypatch):
    """A model with 128 positions, whose tokens are characters."""
    names = {"lm_eval": "simple_evaluate", "lm_eval.api": "", "lm_eval.api.model": "TemplateLM"}
    names |= {"lm_eval.tasks": "TaskManager", "lm_eval.utils": "get_rolling_token_windows make_disjoint_window"}
    for name, needed in names.items():
        module = ModuleType(name)
        for attribute in needed.split():
            setattr(module, attribute, type(attribute, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "qkvflow.generation.harness", raising=False)
    module = importlib.import_module("qkvflow.generation.harness")
    writer = SimpleNamespace(tokenizer=None, prepared=SimpleNamespace(max_seq_len=128))
    model = module.HarnessModel(None, writer, batch_size=2)
    model.tok_encode = lambda text: [ord(c) for c in text]
    yield model
    sys.modules.pop("qkvflow.generation.harness", None)


@pytest.mark.parametrize(
    ("prompt", "asked", "new", "kept"),
    [(39, None, 89, 39), (200, None, 64, 64), (10, None, 118, 10), (200, 4, 4, 124), (39, 100, 100, 28)],
)
def test_prompts_are_cut_to_leave_room_but_not_away(harness, prompt, asked, new, kept):
    options = {"until": ["x"]} | ({} if asked is None else {"max_gen_toks": asked})
    tokens, length, stops, _ = harness._job(0, "a" * (prompt - 1) + "b", options)
    assert (len(tokens), length, stops) == (kept, new, ["x"])
    assert tokens[-1] == ord("b")
    assert len(tokens) + length <= 128


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_every_name_of_the_number_of_new_tokens_is_read(harness, name):
    assert harness._job(0, "a", {name: 7})[1] == 7


def test_a_task_that_leaves_no_room_for_its_prompt_is_refused(harness):
    with pytest.raises(UserError, match=r"asks for 128 new tokens .* 128 positions"):
        harness._job(0, "a", {"max_gen_toks": 128})


def test_repeated_requests_are_drawn_with_other_seeds(harness):
    seen = []
    harness._write = lambda jobs: [seen.append(options.seed) or str(options.seed) for *_, options in jobs]
    request = SimpleNamespace(args=("a", {"do_sample": True, "max_gen_toks": 4}))
    assert harness.generate_until([request] * 5) == ["0", "1", "2", "3", "4"]
    assert sorted(seen) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("asked", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": None}, 0.0),
        ({"do_sample": False, "temperature": None}, 0.0),
        ({"do_sample": True, "temperature": None}, 1.0),
        ({"temperature": 0.5}, 0.5),
    ],
)
def test_a_temperature_that_is_null_is_not_given(harness, asked, temperature):
    *_, options = harness._job(0, "a", asked)
    assert options.temperature == temperature


@pytest.mark.parametrize(("asked", "given"), [(0, None), (-1, None), (None, None), (5, 5)])
def test_no_limit_of_top_k_is_written_as_in_transformers(harness, asked, given):
    *_, options = harness._job(0, "a", {"top_k": asked, "do_sample": True, "temperature": 1.0})
    assert options.top_k == given


def test_settings_that_generation_does_not_have_are_told(harness):
    with pytest.warns(Notice, match=r"num_beams: 4, min_p: 0\.1 \(generation_kwargs\), .* goes without"):
        harness._job(0, "a", {"num_beams": 4, "min_p": 0.1, "until": ["x"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        harness._job(0, "a", {"num_beams": 1, "repetition_penalty": 1.0, "use_cache": True, "num_return_sequences": 1})


def test_greedy_tasks_may_have_limits_of_sampling(harness):
    """Which they do not use, so that values that sampling refuses are harmless."""
    assert harness._job(0, "a", {"do_sample": False, "top_p": 0, "top_k": 3})[3] == SamplingOptions(0.0, seed=0)
    with pytest.raises(UserError, match="top_p"):
        harness._job(0, "a", {"do_sample": True, "top_p": 0})


def test_no_new_tokens_are_no_text(harness):
    harness._write = lambda jobs: ["text"] * len(jobs)
    requests = [SimpleNamespace(args=("a", {"max_gen_toks": count})) for count in (0, 2, 0)]
    assert harness.generate_until(requests) == ["", "text", ""]
