"""The program: in, out and back bit for bit; folders as runs; what is damaged or in the way changes nothing."""

import json
import re
import shutil
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from support.earlier import restore

from qkvflow import convert, describe, eval_lm, finetune_lm, sample_lm
from qkvflow.analysis import lyapunov, report, spectral
from qkvflow.cli import parse
from qkvflow.data import resolve_tokenizer
from qkvflow.errors import UserError
from qkvflow.generation.writer import open_writer
from qkvflow.hub.tokenizer import OLD_FILES
from qkvflow.hub.write import write_folder
from qkvflow.models.levanter_twin import enter
from qkvflow.runs import load_run
from qkvflow.runs.config import FinetuneConfig

OLD = Path(__file__).parents[1] / "support" / "old_runs"


def run_convert(*words):
    return convert.main(parse(convert.ConvertConfig, [str(word) for word in words])[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trained GPT-2 as a folder of Hugging Face."""
    return run_convert("--run", OLD / "gpt2", "--to_hf", tmp_path_factory.mktemp("hub") / "gpt2")


@pytest.fixture
def own(folder, tmp_path):
    """A copy to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "own"))


def test_out_in_and_out_again(folder, tmp_path):
    """Bit for bit, and so is the model in between."""
    run = run_convert("--from_hf", folder, "--run", tmp_path / "run")
    again = run_convert("--run", run, "--to_hf", tmp_path / "again")
    first, second = (load_file(place / "model.safetensors") for place in (folder, again))
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name
    assert_same_arrays(*(enter(load_run(place).model) for place in (OLD / "gpt2", run)))
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (again / name).read_bytes()


def assert_same_arrays(one, other):
    for a, b in zip(*(filter(eqx.is_array, jax.tree.leaves(model)) for model in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_folder_is_a_run(folder, tmp_path, monkeypatch):
    """The same losses as the run that it came from, by itself and as a run of its own."""
    monkeypatch.chdir(tmp_path)
    text = OLD / "text.txt"
    data = ["--data.train", text, "--data.validation_fraction", "0.2", "--data.cache_dir", "cache"]
    run_convert("--from_hf", folder, "--run", "runs/made", *data)
    directly = Path(shutil.copytree(folder, tmp_path / "direct"))
    expected = json.loads((OLD / "expected.json").read_text())["gpt2"]["readings"][0]["loss"]
    made = eval_lm.main(eval_lm.EvalConfig("runs/made", batch_size=4))[0]
    assert made.steps == load_run(directly).config.model.num_layers
    assert made.loss == pytest.approx(expected, rel=2e-6)  # as in tests/runs/test_old_runs.py
    assert_same_arrays(*(load_run(place).model for place in ("runs/made", directly)))


@pytest.mark.slow
@pytest.mark.program
def test_every_program_reads_a_folder(own, tmp_path, monkeypatch, capsys):
    """As it reads a run: what each says or writes is there."""
    monkeypatch.chdir(tmp_path)

    def call(program, config, *words):
        return program.main(parse(config, [str(word) for word in ("--run", own, *words)])[0])

    text = ("--data.validation", OLD / "text.txt")
    assert call(eval_lm, eval_lm.EvalConfig, *text, "--max_eval_batches", 1)[0].loss < 6.0
    capsys.readouterr()
    call(sample_lm, sample_lm.SampleConfig, "--prompt", "The", "--max_new_tokens", 4, "--temperature", 0)
    assert capsys.readouterr().out.startswith("The")
    call(spectral, spectral.SpectralConfig, "--draws", 0, "--text", "a: b")
    call(lyapunov, lyapunov.LyapunovConfig, "--text", "a: b", "--k", 2, "--texts", 0)
    call(report, report.ReportConfig, "--text", "a: b")
    assert {"spectral.npz", "lyapunov.npz", "report.html"} < {path.name for path in (own / "analysis").iterdir()}
    describe.main(parse(describe.DescribeConfig, describe.arguments(["--run", str(own)]))[0])
    assert "parameters" in capsys.readouterr().out


def test_lora_on_a_folder_leaves_merged(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--config_path", str(OLD / "lora.yaml"), "--run", str(folder), "--data.train", str(OLD / "text.txt")]
    words += ["--checkpoint_step", "null", "--trainer.id", "tuned", "--trainer.num_train_steps", "2", "--steps", "null"]
    run = finetune_lm.main(parse(FinetuneConfig, words)[0])
    out = run_convert("--run", run, "--to_hf", tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    before, after = (load_file(place / "model.safetensors") for place in (folder, out))
    assert before.keys() == after.keys()
    assert any(before[name].tobytes() != after[name].tobytes() for name in before)


def test_the_card_says_what_it_is(tmp_path):
    out = run_convert("--run", OLD / "flow", "--to_hf", tmp_path / "flow", "--steps", 5)
    card = (out / "README.md").read_text()
    assert "exported with 5 steps of `euler`" in card
    assert "| nats per token, at the trained depth, 3 steps | |" in card  # not at the 5 steps beside it
    assert "| eval/loss | 4.9" in card
    assert "trust_remote_code=True" in card
    assert f"--to_hf {out} --steps 5" in card
    words = ["--run", OLD / "flow", "--to_hf", tmp_path / "as_trained", "--checkpoint_step", 3]
    card = (run_convert(*words) / "README.md").read_text()
    assert f"{tmp_path / 'as_trained'} --checkpoint_step 3\n" in card
    assert "| nats per token | |" in card


@pytest.mark.parametrize("steps", [1, 4])
def test_ordinary_layers_are_all_exported_or_none(tmp_path, steps):
    """Of 2 layers, 1 step would leave out one without a word."""
    with pytest.raises(UserError, match=rf"--steps is {steps}, but .* 2 layers, which has only this depth"):
        run_convert("--run", OLD / "gpt2", "--to_hf", tmp_path / "out", "--steps", steps)
    assert not list(tmp_path.iterdir())
    card = (run_convert("--run", OLD / "gpt2", "--to_hf", tmp_path / "out", "--steps", 2) / "README.md").read_text()
    assert "An ordinary model of 2 layers." in card


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"depth": {"solver": "tsit5", "rtol": 1e-3}}, "add --steps M"),
        ({"block": {"convolution": 3}}, "a block with a convolution"),
    ],
)
def test_what_cannot_leave_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, model, told):
    run = restore(tmp_path) / "runs" / "flow"
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key, changes in model.items():
        config["model"][key] |= changes
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(convert, "load_run", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match=told):
        run_convert("--run", run, "--to_hf", tmp_path / "out")


def test_an_export_at_a_depth_where_the_flow_is_lost_is_told(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(OLD / "flow", "flow")
    shutil.copyfile(OLD / "text.txt", "text.txt")
    eval_lm.main(eval_lm.EvalConfig("flow", max_eval_batches=1))  # tokenizes its text
    Path("flow/metrics.jsonl").write_text(json.dumps({"step": 3, "eval/loss": 4.0}) + "\n")
    run_convert("--run", "flow", "--to_hf", "out", "--steps", 4)
    told = "does not work at this depth.* was 4.000 in training, and is now: euler with 4 steps 4.9"
    assert re.search(told, capfd.readouterr().err)


def test_a_name_of_several_words(tmp_path):
    """The card's Python is Python, its command one of a shell."""
    out = run_convert("--run", OLD / "gpt2", "--to_hf", tmp_path / 'my "model" é')
    card = (out / "README.md").read_text()
    assert 'AutoTokenizer.from_pretrained("my \\"model\\" é")' in card
    assert f"--to_hf '{out}'" in card


def test_a_bucket_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="must be a local folder"):
        run_convert("--run", OLD / "gpt2", "--to_hf", "gs://bucket/model")
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(folder, tmp_path):
    before = _content(folder)
    with pytest.raises(UserError, match="already exists"):
        run_convert("--run", OLD / "gpt2", "--to_hf", folder)
    with pytest.raises(UserError, match="already exists"):
        run_convert("--from_hf", folder, "--run", tmp_path)
    with pytest.raises(UserError, match=r"name of the run \(--run\) is 'my model', but"):
        run_convert("--from_hf", "somebody/nothing", "--run", tmp_path / "my model")
    assert _content(folder) == before
    assert not list(tmp_path.iterdir())


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def change(own, **arrays):
    """Other arrays; None for one that goes."""
    found = load_file(own / "model.safetensors") | {name.replace("__", "."): a for name, a in arrays.items()}
    save_file({name: a for name, a in found.items() if a is not None}, own / "model.safetensors", {"format": "pt"})


def set_config(own, **values):
    raw = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(raw | values))


def head(own, factor=1, rows=None):
    """An array for a head that is to be the embedding."""
    change(own, lm_head__weight=factor * load_file(own / "model.safetensors")["transformer.wte.weight"][:rows])


DAMAGES = {
    "cut arrays": (lambda own: cut(own / "model.safetensors", 1000), "damaged or incomplete"),
    "empty arrays": (lambda own: cut(own / "model.safetensors", 0), "damaged or incomplete"),
    "cut config": (lambda own: cut(own / "config.json", 40), "config.json cannot be read"),
    "cut tokenizer": (lambda own: cut(own / "tokenizer.json", 300), "the tokenizer in .*/own cannot be read"),
    "no arrays": (lambda own: (own / "model.safetensors").unlink(), "has no model.safetensors"),
    "no tokenizer": (lambda own: (own / "tokenizer.json").unlink(), "tokenizer"),
    "array missing": (lambda own: change(own, transformer__wte__weight=None), "wte.weight is missing"),
    "array too many": (lambda own: change(own, transformer__extra=np.zeros(2)), "extra is unknown"),
    "other shape": (lambda own: change(own, transformer__ln_f__bias=np.zeros(2)), "ln_f.bias has the shape"),
    "other kind": (lambda own: (own / "config.json").write_text('{"model_type": "bert"}'), "bert"),
    "no object": (lambda own: (own / "config.json").write_text("[]"), "not contain a JSON object"),
    "no size": (lambda own: set_config(own, vocab_size=None), "vocab_size is None"),
    "a size in words": (lambda own: set_config(own, n_layer="two"), "num_hidden_layers is 'two'"),
    "a size below nothing": (lambda own: set_config(own, n_layer=-1), "num_hidden_layers is -1"),
    "a billion layers": (lambda own: set_config(own, n_layer=10**9), "1000000000 layers, but there are 28 arrays"),
    "heads that do not divide": (lambda own: set_config(own, n_head=3), "not a multiple of n_head"),
    "no epsilon": (lambda own: set_config(own, layer_norm_epsilon=None), "layer_norm_epsilon is None"),
    "dropout of all": (lambda own: set_config(own, resid_pdrop=1.0), "resid_pdrop is 1.0"),
    "quantised": (lambda own: change(own, transformer__wte__weight=np.zeros((257, 8), np.int8)), "in the format I8"),
    "a head of its own": (lambda own: head(own, factor=2), "lm_head.weight is another array"),
    "a head too short": (lambda own: head(own, rows=5), "lm_head.weight is another array"),
    "index of files elsewhere": (
        lambda own: (
            (own / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'),
            (own / "model.safetensors").unlink(),
        ),
        "incomplete",
    ),
    "two models": (
        lambda own: (own / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "both model.safetensors and model.safetensors.index.json",
    ),
    "pickles of another model": (
        lambda own: (own / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "b.bin"}}'),
        "both model.safetensors and pytorch_model.bin.index.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_and_nothing_is_made(own, tmp_path, damage):
    make, message = DAMAGES[damage]
    make(own)
    for attempt in (lambda: run_convert("--from_hf", own, "--run", tmp_path / "run"), lambda: load_run(own)):
        with pytest.raises(UserError, match=message):
            attempt()
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_an_index_of_the_one_file_is_harmless(own):
    before, names = load_run(own).model, load_file(own / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (own / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same_arrays(before, load_run(own).model)


def test_a_head_that_is_the_embedding(own):
    """As some programs save it."""
    before = load_run(own).model
    head(own)
    assert_same_arrays(before, load_run(own).model)


def test_a_tokenizer_that_does_not_fit(own, tmp_path):
    from qkvflow.data.byte_level import byte_tokenizer
    from qkvflow.data.tokenizers import _save

    larger = byte_tokenizer()
    larger.add_special_tokens(["<|more|>"])
    _save(larger, None, own)
    with pytest.raises(UserError, match="258 tokens, but the model only has 257"):
        run_convert("--from_hf", own, "--run", tmp_path / "run")


def old_tokenizer(own, **settings):
    """Leaves the folder with the files of a tokenizer that transformers must convert, and code that it must not run."""
    (own / "tokenizer.json").unlink()
    (own / "vocab.json").write_text(json.dumps({"a": 0}))
    (own / "merges.txt").write_text("")
    (own / "evil.py").write_text(f"open({str(own / 'executed')!r}, 'w')\nclass Tokenizer: pass\n")
    code = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    (own / "tokenizer_config.json").write_text(json.dumps(code | settings))


def test_a_tokenizer_to_convert_brings_no_code(own, tmp_path):
    """transformers would ask on the terminal whether to run it, and wait for an answer."""
    old_tokenizer(own)
    with pytest.raises(UserError, match=r"the tokenizer in .* cannot be converted"):
        run_convert("--from_hf", own, "--run", tmp_path / "run")
    assert not (own / "executed").exists()


def test_a_tokenizer_leaves_without_the_code_that_it_names(own, tmp_path):
    """The code stays behind, so that nothing could be loaded by it."""
    path = own / "tokenizer_config.json"
    code = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": [None, "evil.Tokenizer"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | code))
    out = run_convert("--run", run_convert("--from_hf", own, "--run", tmp_path / "run"), "--to_hf", tmp_path / "out")
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert (settings["tokenizer_class"], "auto_map" in settings) == ("PreTrainedTokenizerFast", False)


def test_a_name_out_of_reach(tmp_path):
    """Tests are offline."""
    with pytest.raises(UserError, match="could not be fetched"):
        run_convert("--from_hf", "nobody/nothing", "--run", tmp_path / "run")


def test_what_went_out_with_code_is_not_read_back(tmp_path):
    out = run_convert("--run", OLD / "flow", "--to_hf", tmp_path / "flow")
    with pytest.raises(UserError, match="use that run instead"):
        load_run(out)


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    """As where a disk becomes full while arrays are written."""

    def fail(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qkvflow.hub.write.save_file", fail)
    with pytest.raises(UserError, match="full"):
        run_convert("--run", OLD / "gpt2", "--to_hf", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_large_models_take_several_files(tmp_path):
    tokenizer = resolve_tokenizer("byte", tmp_path / "tokenizer")
    run = load_run(OLD / "gpt2")
    for limit, name in ((1 << 30, "whole"), (4000, "parts")):
        (tmp_path / name).mkdir()
        write_folder(enter(run.model).discretise(), tokenizer, tmp_path / name, limit)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert_same_arrays(*(load_run(tmp_path / name).model for name in ("whole", "parts")))


@pytest.mark.parametrize("places", [("generation_config.json",), ("config.json",)])
def test_generation_ends_at_any_end_token(folder, own, tmp_path, places):
    """Chat models have several; they survive an import and an export."""
    (own / "generation_config.json").unlink()
    for name in places:
        settings = json.loads((folder / name).read_text()) | {"eos_token_id": [65, 66, 10**6]}
        (own / name).write_text(json.dumps(settings))
    end = load_run(folder).tokenizer.eos_token_id
    run = run_convert("--from_hf", own, "--run", tmp_path / "run")
    again = run_convert("--run", run, "--to_hf", tmp_path / "again")
    for place in (own, run, again):
        assert open_writer(place).stop_tokens == (end, 65, 66)
    assert open_writer(folder).stop_tokens == (end,)
    assert json.loads((again / "generation_config.json").read_text())["eos_token_id"] == [end, 65, 66]


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_an_end_token_that_only_the_model_names(own, tmp_path, place):
    """As in the folder of GPT-2 itself: transformers knows the token by the class of its tokenizer."""
    (own / "generation_config.json").unlink()
    (own / "special_tokens_map.json").unlink(missing_ok=True)
    settings = {name: json.loads((own / name).read_text()) for name in ("tokenizer_config.json", "config.json")}
    (own / "tokenizer_config.json").write_text(json.dumps({**settings["tokenizer_config.json"], "eos_token": None}))
    (own / "config.json").write_text(json.dumps({**settings["config.json"], "eos_token_id": None}))
    assert load_run(own).tokenizer.eos_token_id is None
    end = {**(settings["config.json"] if place == "config.json" else {}), "eos_token_id": 256}
    (own / place).write_text(json.dumps(end))
    run = run_convert("--from_hf", own, "--run", tmp_path / "run")
    again = run_convert("--run", run, "--to_hf", tmp_path / "again")
    for where in (own, run, again):
        assert load_run(where).tokenizer.eos_token_id == 256
        assert open_writer(where).stop_tokens == (256,)
    assert json.loads((again / "generation_config.json").read_text())["eos_token_id"] == 256


def test_a_name_with_an_at_sign(folder, tmp_path):
    """Where a folder has the name before the sign, too, the other one is read."""
    shutil.copytree(folder, tmp_path / "gpt2")
    own = Path(shutil.copytree(folder, tmp_path / "gpt2@step500@last"))
    head(own.parent / "gpt2", factor=1)
    arrays = load_file(own / "model.safetensors")
    name = next(name for name in arrays if name.endswith("ln_f.bias"))
    change(own, **{name: arrays[name] + 1})
    assert float(load_run(own).model.transformer.ln_f.bias.array[0]) == pytest.approx(arrays[name][0] + 1)


@pytest.mark.parametrize("there", ["config", "model"])
def test_a_download_that_was_interrupted_is_continued(folder, tmp_path, monkeypatch, there):
    """The hub's client takes any folder of its cache for the whole; transformers fetches a model without tokenizer."""
    asked = []
    part = tmp_path / "part"
    part.mkdir()
    for file in folder.iterdir() if there == "model" else [folder / "config.json"]:
        if "token" not in file.name and file.name not in OLD_FILES:
            shutil.copyfile(file, part / file.name)

    def snapshot_download(name, local_files_only=False, **options):
        asked.append(local_files_only)
        return str(part if local_files_only else folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    run = run_convert("--from_hf", "someone/gpt2", "--run", tmp_path / "run")
    assert asked == [True, True, False], "config.json is there, but not all else"
    assert_same_arrays(*(enter(load_run(place).model) for place in (folder, run)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mamba", r"someone/model contains a model of type 'mamba', which is not supported"),
        ("qkvflow", "use that run instead"),
        (None, r"someone/model has no config\.json"),
    ],
)
def test_what_is_not_supported_is_not_fetched(tmp_path, monkeypatch, kind, message):
    if kind is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))

    def snapshot_download(name, allow_patterns, **options):
        assert allow_patterns == ["config.json"]
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(UserError, match=message):
        run_convert("--from_hf", "someone/model", "--run", tmp_path / "run")


def test_the_card_counts_all_layers_and_names_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(OLD / "gpt2")
    out = run_convert("--run", ".", "--to_hf", tmp_path / "out")
    card = (out / "README.md").read_text()
    assert "An ordinary model of 2 layers." in card
    assert "the run `gpt2` after step 3" in card
    assert open_writer(".").name == "gpt2"
