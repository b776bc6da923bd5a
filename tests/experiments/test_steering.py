"""Steering: the judge by hand, records that say their source and nothing else, numbers from the record alone."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from support.studies import COUNTS, ORIGIN, refuse_work, smoke

from experiments.jobs import reported
from experiments.records import read
from experiments.statistics import holm, paired
from experiments.steering.__main__ import STUDY, upper_bound
from experiments.steering.controls import TOKENS, between, cut, sequences, token_of, training_records
from experiments.steering.judge import Judge, K, NgramModel, pieces_of
from experiments.steering.plan import ARMS, SteeringConfig, arms
from experiments.steering.report import AGAINST_TOKEN, Steering, accuracies, draw, files, losses
from experiments.texts import PARTS, Builtin, Text, write_new
from qkvflow.errors import UserError


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[Text]:
    return [Builtin(name).prepare(tmp_path_factory.mktemp("texts")) for name in ("topics", "library")]


def test_the_judge_counts_as_by_hand():
    model = NgramModel(b"abcabcabd")  # abca bcab cabc abca bcab cabd
    for piece, gram, context in ((b"abca", 2, 2), (b"cabd", 1, 2), (b"cabx", 0, 2), (b"xyzw", 0, 0)):
        expected = math.log((gram + K) / (context + 256 * K))
        assert model.log_probability(piece) == pytest.approx(expected)
    both = model.log_probability(b"abca") + model.log_probability(b"bcab")
    assert model.log_probability(b"abcab") == pytest.approx(both)
    assert model.log_probability(b"abc") == 0.0
    judge = Judge(b"abcabcabc", b"xyzxyzxyz" + b"q" * 1000)  # known by as many bytes
    assert judge.b.grams.total() == judge.a.grams.total() == 6
    assert judge.score(b"xyzx") == pytest.approx(-judge.score(b"abca"))
    assert judge.score(b"xyzx") > 0
    assert judge.share_of_b([b"xyzx", b"abca", b"", b"xyzxyz"]) == (1 + 0 + 0.5 + 1) / 4
    with pytest.raises(UserError, match="at least 4 bytes"):
        Judge(b"abc", b"abcd")


def test_pieces_do_not_overlap():
    text = bytes(range(100))
    assert pieces_of(text, 10, 4) == [text[s : s + 10] for s in (0, 25, 50, 75)]
    assert b"".join(pieces_of(text, 10, 50)) == text
    assert pieces_of(text, 101, 4) == []


def test_the_judge_separates_real_texts(texts):
    topics, library = (Path(text.file("select")).read_bytes() for text in texts)
    # A judge knows both texts by as many bytes, and the library's first ones are of two or three modules only.
    judge = Judge(topics, b"".join(pieces_of(library, 500, len(topics) // 500)))
    long, short = (upper_bound(judge, texts, length) for length in (240, 30))
    assert long.accuracy > 0.85 > short.accuracy > 0.6
    assert long.accuracy == pytest.approx((1 - long.shares[0] + long.shares[1]) / 2)


def test_records_say_their_source_and_begin_anywhere(texts, tmp_path):
    def made(name, **options):
        path = training_records(texts, "train", tmp_path / name, size=200, without=0.2, **options)
        return [json.loads(line) for line in Path(path).read_text().splitlines()]

    steered, shuffled = made("steered", shuffled=False), made("shuffled", shuffled=True)
    whole = [text.read("train") for text in texts]
    for kind, text in (([1.0, 0.0], whole[0]), ([0.0, 1.0], whole[1])):
        own = [r["text"] for r in steered if r["control"] == kind]
        assert abs(len(own) / len(steered) - 0.4) < 0.02
        assert all(piece in text for piece in own[:50])
    assert len(cut(whole[0], 200)) == len(whole[0]) // 200
    assert {len(r["text"]) for r in steered} == {200}
    assert [r["text"] for r in shuffled] == [r["text"] for r in steered]  # only the controls differ
    of = {r["text"]: str(r["control"]) for r in steered}
    assert sorted(of.values()) == sorted(str(r["control"]) for r in shuffled)
    same = [of[r["text"]] == str(r["control"]) for r in shuffled]
    assert abs(sum(same) / len(same) - (0.4**2 + 0.4**2 + 0.2**2)) < 0.05


def test_a_text_has_no_control_token():
    every = "".join(map(chr, (n for n in range(0x110000) if not 0xD800 <= n < 0xE000)))
    assert not set(TOKENS) & set(every.encode())
    assert [token_of(control) for control in (between(0.0), between(1.0), between(0.5), None)] == [
        [0xFE],
        [0xFF],
        [],
        [],
    ]


def test_control_tokens_begin_records_and_sequences():
    (a, b), end = TOKENS, 256
    records = ["abcde", "fé", "gh", "ij"], [between(0.0), between(1.0), None, between(0.0)]
    found, report = ([*sequences(*records, 4, starts)] for starts in (True, False))
    assert [row["input_ids"] for row in found] == [row["input_ids"] for row in report]
    assert [row["input_ids"] for row in found] == [
        [a, *b"abc"],  # and d, which makes room
        [a, *b"e", end, b],
        [b, 0xA9, end, *b"g"],  # the other half of é
        [end, a, *b"ij"],
    ]
    assert [row["loss_weights"] for row in found] == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0]]
    assert [row["loss_weights"] for row in report] == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0]]


def test_tokens_and_vectors_say_the_same_of_the_same_sequences(tmp_path):
    """In the order of a seed: in training, through packing and shuffling as they are."""
    texts = [Text(name, tmp_path / name) for name in ("one", "two")]
    for text, line in zip(texts, ("the first text, {} é\n", "A SECOND ONE, {}\n"), strict=True):
        for k, part in enumerate(("train", "select", "report")):
            write_new(Path(text.file(part)), "".join(line.format(n) for n in range(1000 * k, 1000 * k + 1000)))
    made = {arm.label: arm.recipe.config for arm in arms(smoke(STUDY, record=200), texts, tmp_path)}

    def trained_on(config):
        data = config.data.resolve(tmp_path / "tokenizer", config.control_dim)
        found = data.train_set(config.Pos, config.trainer.batch_schedule, key=jax.random.PRNGKey(3)).as_sync_dataset()
        return found.get_batch(range(300))

    names = {(1.0, 0.0): [TOKENS[0]], (0.0, 1.0): [TOKENS[1]], (0.0, 0.0): []}
    for one, other in zip(trained_on(made["steered"]), trained_on(made["token"]), strict=True):
        stream, row, counts = (np.asarray(x.array).tolist() for x in (one.tokens, other.tokens, other.loss_weight))
        controls, expected = map(tuple, one.control.array.tolist()), []
        for before, token, own in zip((256, *stream), stream, controls, strict=False):
            expected += [*names[own], token] if before == 256 else [token]
        assert row == expected[: len(row)]
        assert counts == [float(token not in TOKENS) for token in row[1:]] + [0.0]
    # As many layers as the hybrid evaluates, without control.
    flow, layers = made["steered"].model, made["token"].model
    assert (layers.control, layers.prelude_layers, layers.coda_layers) == (None, flow.prelude_layers, flow.coda_layers)
    assert (layers.depth.steps, layers.depth.step_size) == (flow.depth.steps, "residual")


def test_jobs_are_configurations_and_what_cannot_be_is_refused(texts, tmp_path):
    config = smoke(STUDY)
    config.check()
    planned = reported(arms(config, texts, tmp_path), config.seeds)
    assert [(job.arm.label, job.seed) for job in planned] == [(arm, seed) for seed in (1, 2) for arm in ARMS]
    for job in planned:
        assert job.recipe.config.data.control_key == (None if job.arm.label == "token" else "control")
        assert "report" not in json.dumps(job.recipe.raw)
        assert f"{job.arm.label}-train" in json.dumps(job.recipe.raw["data"])
    # Measured without the arm `token`, the others are not measured again.
    asked = {"record", "without_control", "samples", "length", "temperature", "between", "topics", "library"}
    assert all(set(job.arm.asks) == asked for job in planned)
    assert all(job.arm.asks[text.name] == [text.hash(part) for part in PARTS] for job in planned for text in texts)
    for changes, message in (
        ({"base": "configs/wikitext2/neuralode.yaml", "overrides": {}}, r"control.dim` must be 2, .* but is None"),
        ({"length": 64}, "longer than `model.max_seq_len`, 64"),
    ):
        with pytest.raises(UserError, match=message):
            arms(smoke(STUDY, **changes), texts, tmp_path)
    with pytest.raises(UserError, match=r"topics has fewer than 100000000 characters in train, select, report"):
        arms(smoke(STUDY, record=10**8), texts, tmp_path)
    for changes, message in (
        ({"b": {"type": "builtin", "text": "topics"}}, "both are 'topics'"),
        ({"between": [0.0, 0.5]}, "must have 0 .* and 1"),
        ({"temperature": 0.0}, "`temperature` must be above 0"),
        ({"samples": 0}, "`samples` must be at least 1"),
        ({"seeds": [3]}, "at least two"),
    ):
        with pytest.raises(UserError, match=message):
            smoke(STUDY, **changes).check()
    with pytest.raises(UserError, match="nothing to study"):
        STUDY.carry_out(SteeringConfig())


def made_up(**more: tuple[float, ...]) -> Steering:
    """Of three seeds the steered model is right on 0.8, 0.9, 0.9, the other on 0.5, 0.6, 0.4, and `more`."""
    right = {"steered": (0.8, 0.9, 0.9), "shuffled": (0.5, 0.6, 0.4), **more}
    results = [
        {
            "arm": arm,
            "seed": seed,
            "accuracy": all_[seed],
            "judged_b": {"0.0": 1 - all_[seed], "1.0": all_[seed], "none": 0.5}
            | ({} if arm == "token" else {"0.5": 0.4 + 0.1 * seed}),
            "losses": {"right": 2.0, "wrong": 2.0 + all_[seed], "none": 2.1 + 0.01 * seed},
            "examples": {u: ["x"] for u in ("0.0", "0.5", "1.0", "none")},
        }
        for seed in range(3)
        for arm, all_ in right.items()
    ]
    protocol = {"seeds": [0, 1, 2], "learning_rate": 0.01, "steps": 10, "between": [0.0, 0.5, 1.0]}
    protocol |= {"counted": 10, "counts": COUNTS}
    texts = [{"name": name, "parts": {"train": "t"}, "bytes": {}} for name in ("one", "two")]
    judge = {"shares": [0.1, 0.95], "accuracy": 0.925, "pieces": 20}
    record = {"protocol": protocol, "texts": texts, "arms": {arm: ARMS[arm] for arm in right}}
    record |= {"judge": judge, "results": results, "parameters": dict.fromkeys(more, 930_000)}
    return read(Steering, record | ORIGIN)


def test_numbers_come_from_the_record_alone():
    record = made_up()
    found, chance = accuracies(record), dict.fromkeys(range(3), 0.5)
    tests = [paired(dict(enumerate(right)), chance) for right in ((0.8, 0.9, 0.9), (0.5, 0.6, 0.4))]
    assert [found[arm].difference for arm in record.arms] == tests
    assert [found[arm].p_holm for arm in record.arms] == holm([test.p for test in tests])
    heard = losses(record)
    assert heard["steered", "wrong"].difference.mean == pytest.approx(2.6 / 3)
    assert heard["shuffled", "right"].difference is None
    text = STUDY.filled_page(record)
    assert "| steered | 0.867 ± 0.143 | 0.367 ± 0.143 |" in text
    assert "upper bound | 0.925 |" in text
    assert "oken" not in text.replace("end-of-document token", "")
    runs = files(record)["runs.csv"]
    assert len(runs.rows) == 6
    assert {"loss wrong", "judged_b none"} <= set(runs.head)


def test_a_record_with_control_tokens_has_nothing_between_the_texts():
    token = (0.7, 0.95, 0.8)
    record, without = made_up(token=token), made_up()
    text = STUDY.filled_page(record)
    versus = paired(dict(enumerate((0.8, 0.9, 0.9))), dict(enumerate(token)))
    p_holm = holm([own.difference.p for own in accuracies(record).values() if own.difference])[-1]
    assert f"Steered minus token: {versus} (p = {p_holm:.2g}; family of 4, n = 3)." in text
    assert "| token | 0.183 ± 0.313 | | 0.817 ± 0.313 | 0.500 ± 0.000 |" in text
    assert f"`token`: {ARMS['token']} (0.93M parameters)." in text
    assert "| token | wrong | 2.817 ± 0.313 | 0.817 ± 0.313 |" in text
    family, fewer = (accuracies(one) for one in (record, without))
    tests = [*record.arms, AGAINST_TOKEN]
    assert [family[arm].p_holm for arm in tests] == holm([family[arm].difference.p for arm in tests])
    assert family["steered"].p_holm > fewer["steered"].p_holm
    ((_, figure),) = draw(record)
    lines = [bars.lines[0] for bars in figure.axes[0].containers]
    assert [len(line.get_xdata()) for line in lines] == [3, 1, 3, 1, 2, 1]
    assert [line.get_linestyle() for line in lines[::2]] == ["-", "--", "None"]  # none through what is not there


@pytest.mark.slow
def test_the_smoke_test_steers_and_then_trains_nothing(tmp_path, monkeypatch):
    before = STUDY.carry_out(smoke(STUDY, run_dir=str(tmp_path)))
    names = {"results.json", "results.md", "runs.csv", "figure.png", "figure.pdf"}
    assert {path.name for path in (tmp_path / "results").iterdir()} == names
    steered = [r for r in before.results if r.arm == "steered"]
    assert all(r.losses["right"] < r.losses["wrong"] - 0.005 for r in steered)
    assert all(r.report_loss == r.losses["right"] for r in steered)
    tokens = [r for r in before.results if r.arm == "token"]
    assert all(r.losses["right"] < r.losses["wrong"] for r in tokens)
    assert all(set(r.judged_b) == {"0.0", "1.0", "none"} for r in tokens)
    refuse_work(monkeypatch)
    assert STUDY.carry_out(smoke(STUDY, run_dir=str(tmp_path))).results == before.results
