"""The program `describe`: its sums, its table, its command line; and how much weights vary over time."""

import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from levanter.trainer_state import trainables_only
from support.models import build, llama, small_config
from support.tiny import FLOW, tiny

from qkvflow import describe as program
from qkvflow.cli import parse
from qkvflow.config import decode
from qkvflow.errors import UserError
from qkvflow.finetune_lm import main as finetune
from qkvflow.models import lora
from qkvflow.runs import load_run
from qkvflow.runs.config import FinetuneConfig, TrainConfig
from qkvflow.train_lm import main as train
from qkvflow.training import description
from qkvflow.weights import at, variation

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = [
    p for p in sorted(CONFIGS.rglob("*.yaml")) if p.parent.name not in ("finetune", "mesh") and p.stem != "targets"
]  # those need a run, or another file

FIXED = ["--model.depth.time_sampling", "fixed"]


def described(path, vocab=None, *overrides):
    config = parse(TrainConfig, ["--config_path", str(path), *overrides])[0]
    return program.describe(config, vocab or program.vocabulary_size(config))


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(CONFIGS)) for p in FILES])
def test_every_configuration(path):
    """Without allocating anything: some of these would need 100 GiB."""
    sections = described(path)
    for name in ("parameters", "parameters, discretised"):
        groups = dict(sections[name])
        assert groups.pop("total") == sum(groups.values())
    # A discretised flow is the ordinary model it replaces, but for norms (gain and bias at every step).
    assert sections["FLOPs per token"]["backward"] == 2 * sections["FLOPs per token"]["forward"] > 0
    assert None not in [v for s in sections.values() for v in s.values()]


def test_the_paper_at_one_billion():
    ours, twin = (described(CONFIGS / f"openwebtext/{n}.yaml") for n in ("llama_1b", "llama_1b_llama"))
    assert ours["parameters"]["flow"] / 1e9 == pytest.approx(6.51, abs=0.01)
    discrete, ordinary = ours["parameters, discretised"]["total"], twin["parameters"]["total"]
    # The official block's norms have a bias: 16 layers of 2 norms of 2048.
    assert discrete - ordinary == 16 * 2 * 2048
    assert ours["KV cache per token"] == twin["KV cache per token"] == {"bf16": "128 KiB", "fp32": "256 KiB"}
    # fp32 parameters; Adam keeps two numbers for each (and a few counters).
    assert ours["memory for training"] == {
        "parameters": "24.74 GiB",
        "gradients": "24.74 GiB",
        "optimizer": "49.49 GiB",
    }
    assert ours["FLOPs per token"]["forward"] == pytest.approx(twin["FLOPs per token"]["forward"], rel=0.002)


def test_overrides_act_on_every_file():
    sections = described(
        CONFIGS / "quickstart.yaml", None, "--model.depth.solver", "rk4", "--model.prelude_layers", "2"
    )
    assert sections["evaluations of the block"]["per token"] == 4 * 6 + 2
    assert sections["parameters"]["prelude"] > 0


@pytest.mark.parametrize(
    ("overrides", "trained", "flops"),
    [
        (["--model.depth.time_sampling", "jitter"], "4 then 7", [4, 7]),
        (["--model.depth.solver", "heun", "--model.coda_layers", "1"], "7 then 13", [7, 13]),
        (["--model.depth.steps", "{min: 3, max: 6}"], "3 or 4 or 6", None),
        (["--model.depth.steps", "6"], None, None),
    ],
)
def test_evaluations_in_training(overrides, trained, flops):
    """Those of all stages, and all that may be drawn; the other rows are of the model outside training."""
    random = described(CONFIGS / "quickstart.yaml", None, *overrides)
    fixed = described(CONFIGS / "quickstart.yaml", None, *overrides, "--model.depth.steps", "6", *FIXED)
    assert random["evaluations of the block"].pop("per token, in training", None) == trained
    told = random["FLOPs per token"].pop("forward, in training", None)
    block, head = 2 * 128**2 * 12 + 4 * 128 * 128, 2 * 128 * 257
    expected = flops and " then ".join(description._cell(float(n * block + head)) for n in flops)
    assert told == expected
    for section in ("evaluations of the block", "FLOPs per token", "FLOPs per batch for W(t)"):
        assert random[section] == fixed[section]


def test_command_line():
    words = program.arguments(
        ["--config_path", "a.yaml", "b.yaml", "--model.depth.steps", "9", "--vocab_size", "100", "--run", "runs/c"]
    )
    config = parse(program.DescribeConfig, words)[0]
    assert config == program.DescribeConfig(
        files=["a.yaml", "b.yaml"], run=["runs/c"], vocab_size=100, overrides=["--model.depth.steps", "9"]
    )
    words = program.arguments(["--config_path=a.yaml", "b.yaml", "--model.depth.steps=9", "--run=runs/c"])
    config = parse(program.DescribeConfig, words)[0]
    assert config == program.DescribeConfig(
        files=["a.yaml", "b.yaml"], run=["runs/c"], overrides=["--model.depth.steps=9"]
    )
    with pytest.raises(UserError, match=r"unexpected word `a\.yaml`"):
        parse(program.DescribeConfig, program.arguments(["a.yaml"]))
    with pytest.raises(UserError, match="nothing to describe"):
        program.main(program.DescribeConfig())
    with pytest.raises(UserError, match=r"--model\.x changes configurations"):
        program.main(program.DescribeConfig(run=["runs/c"], overrides=["--model.x", "1"]))


def test_two_files_of_one_name_are_two_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for place, width in ((tmp_path / "configs", 32), (tmp_path, 64)):
        place.mkdir(exist_ok=True)
        raw = tiny(tmp_path, "a", {**FLOW, "hidden_dim": width}) | {"vocab_size": 257}
        (place / "one.yaml").write_text(yaml.safe_dump(raw))
    files = ["one.yaml", "configs/one.yaml"]
    program.main(program.DescribeConfig(files=files))
    told = capsys.readouterr().out.splitlines()
    assert told[0].split() == files
    assert any(len(set(line.split()[-2:])) == 2 for line in told[1:] if len(line.split()) > 2)


@pytest.mark.parametrize("name", ["exp/🚀.yaml", 'a "b" é\x7f\u2028.yaml'])
def test_names_of_files_may_have_any_characters(name):
    config = parse(program.DescribeConfig, program.arguments(["--config_path", name]))[0]
    assert config.files == [name]
    with pytest.raises(UserError, match="there is no configuration file"):
        program.main(config)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--vocab_size", "-3"], "`vocab_size` must be at least 1, but is -3"),
        (["--vocab_size", "0"], "`vocab_size` must be at least 1, but is 0"),
        (["--model.depth.steps", "100000000"], "`model.depth.steps` must be .* at most 65536"),
        (["--model.depth.steps", "{min: 2, max: 100000000}"], "at most 65536"),
        (["--model.depth.steps", "{min: 2, max: 9, choices: 100000000}"], "at most 64"),
        (["--model.depth.steps", "{grow: {0.0: 2, 0.5: 100000000}}"], "at most 65536"),
        (["--mesh", ""], "empty value"),
        (["--mesh="], "empty value"),
        (["--mesh", "0x8"], "--mesh 0x8: give"),
        (["--mesh", "2", "--json", "no/such/folder/x.json"], "cannot write --json .*its folder is missing"),
        (["--mesh", "2", "--json", "."], "cannot write --json .*it is a folder"),
        (["--mesh", "2", "--json", "/proc/x.json"], "cannot write --json /proc/x.json: "),
        (["--checkpoint_step", "3"], "--checkpoint_step is for runs"),
        (["--mesh", "2", "--slots", "4"], "--slots and --dtype are for a decoding step"),
        (["--mesh", "2", "--dtype", "bf16"], "--slots and --dtype are for a decoding step"),
        (["--serve", "--mesh", "8x8", "--target", "v5e"], r"--mesh 8x8: a decoding step \(--serve\) is for one device"),
        (["--mesh", "²x8"], "--mesh ²x8: give"),
        (["--mesh", "9999999x9999999"], "for at most 65,536 devices"),
        (["--mesh", "9" * 5000], "for at most 65,536 devices"),
    ],
)
def test_mistakes_are_told_before_anything_is_compiled(words, told):
    words = program.arguments(["--config_path", str(CONFIGS / "quickstart.yaml"), *words])
    with pytest.raises(UserError, match=told) as error:
        program.main(parse(program.DescribeConfig, words)[0])
    assert len(str(error.value)) < 400


def test_a_run_has_its_own_vocabulary():
    with pytest.raises(UserError, match="--vocab_size is for configurations"):
        program.main(program.DescribeConfig(run=["runs/x"], vocab_size=5))


def test_what_is_wrong_with_a_base_is_told(tmp_path, monkeypatch):
    """Not that the keys of a fine-tune are none of a training."""
    monkeypatch.chdir(tmp_path)
    words = program.arguments(["--config_path", str(CONFIGS / "finetune" / "quickstart_full.yaml")])
    with pytest.raises(UserError, match=r"runs/quickstart"):
        program.main(parse(program.DescribeConfig, words)[0])


def test_table_has_a_column_for_each():
    text = program.table({"a": {"size": {"x": 1234567, "y": None}}, "b": {"size": {"x": 2.5e9}, "more": {"z": "word"}}})
    assert [line.split() for line in text.splitlines()] == [
        ["a", "b"],
        ["size"],
        ["x", "1,234,567", "2.5", "G"],
        ["y", "-"],
        ["more"],
        ["z", "word"],
    ]


def test_unknown_vocabulary_is_told():
    config = decode(TrainConfig, {"model": {"type": "gpt2"}, "data": {"tokenizer": "./no/such/folder"}})
    with pytest.raises(UserError, match="--vocab_size N"):
        program.vocabulary_size(config)


@pytest.mark.parametrize("weights", ["generated", "per_layer"])
def test_variation_by_hand(weights):
    flow = build(small_config(weights=weights, block=llama("official"))).transformer.flow
    times = flow.plan.times
    found = variation(flow.weights, times)
    w = np.stack([np.asarray(at(flow.weights, t).self_attn.k_proj.weight.array, np.float64) for t in times])
    expected = np.sqrt(((w - w.mean(0)) ** 2).sum() / len(times) / (w.mean(0) ** 2).sum())
    assert found["self_attn.k_proj.weight"] == pytest.approx(expected, rel=1e-4)
    arrays = jax.tree_util.tree_leaves_with_path(eqx.filter(at(flow.weights, times), eqx.is_array))
    assert len(found) == len(arrays)


def test_what_does_not_vary():
    assert variation(build(small_config(weights="constant")).transformer.flow.weights, (0.5, 1.0)) == {}
    flow = build(small_config()).transformer.flow
    # Without the part that depends on time the base remains, or zero, or the 1 of a gain.
    still = eqx.tree_at(
        lambda w: [w.mlp.c_fc.leaves.weight.projection.array, w.mlp.c_fc.leaves.bias.projection.array],
        flow.weights,
        replace_fn=jnp.zeros_like,
    )
    found = variation(still, flow.plan.times)
    assert found["mlp.c_fc.weight"] == found["mlp.c_fc.bias"] == 0.0
    assert found["mlp.c_proj.weight"] > 0


@pytest.mark.slow
@pytest.mark.program
def test_a_trained_run(tmp_path, capsys):
    block = {"type": "llama", "num_heads": 2, "num_kv_heads": 1, "form": "official"}
    raw = tiny(tmp_path, "a", FLOW | {"block": block})
    run = train(decode(TrainConfig, raw))
    capsys.readouterr()
    program.main(program.DescribeConfig(files=[str(CONFIGS / "quickstart.yaml")], run=[str(run)]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [str(CONFIGS / "quickstart"), str(run), "step", "1"]
    rows = {line[2:].split("  ")[0]: line.split() for line in lines}
    assert float(rows["self_attn.q_proj.weight"][-1]) > 0
    assert float(rows["input_layernorm.weight"][-1]) >= 0


@pytest.mark.slow
@pytest.mark.program
def test_the_step_of_runs_and_of_lora_on_a_mesh(tmp_path, capsys):
    """A run as it trains: of LoRA, only what is trained has a gradient and an optimizer's state."""
    raw = tiny(tmp_path, "base")
    base = train(decode(TrainConfig, raw))
    tuned = {key: raw[key] for key in ("data", "run_dir")} | {"run": str(base), "mode": {"type": "lora", "r": 2}}
    tuned |= {"trainer": raw["trainer"] | {"id": "lora"}}
    file = tmp_path / "lora.yaml"
    file.write_text(yaml.safe_dump(tuned))
    run = finetune(decode(FinetuneConfig, tuned))
    found = tmp_path / "found.json"
    program.main(program.DescribeConfig(files=[str(file)], run=[str(base), str(run)], mesh="2", json=str(found)))
    text = capsys.readouterr().out
    config, whole, adapted = (column["mesh"] for column in json.loads(found.read_text()).values())
    for key in ("all_parameters", "all_optimizer", "arguments", "temporary", "flops"):
        assert config[key] == adapted[key], key
    assert 1.9 < whole["all_optimizer"] / whole["all_parameters"] < 2.1  # Adam has two numbers for each
    trained = sum(leaf.size for leaf in jax.tree.leaves(trained_part(run))) * 4
    assert adapted["all_optimizer"] == pytest.approx(2 * trained, abs=100)  # and counters
    assert adapted["all_optimizer"] < 0.3 * adapted["all_parameters"]
    assert "change of W(t) over t" in text


def trained_part(run):
    """What LoRA trained, as arrays."""
    model = load_run(run, merge=False).model
    return trainables_only(model, lora.trainable(model, embeddings=False))
