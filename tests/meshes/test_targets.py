"""Machines that are not here: their names, the text of their compilers, what follows from it. With the compilers
(`make setup EXTRA=dev,targets`) a step is compiled by each; without them those tests are skipped."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from levanter.utils.mesh import MeshConfig
from support.configs import FILES, ROOT, TARGETS

from experiments.bench import targets as bench
from qkvflow import describe as program
from qkvflow.cli import parse
from qkvflow.errors import UserError
from qkvflow.meshes.chips import CHIPS, GIB
from qkvflow.meshes.collectives import Collective, collectives
from qkvflow.meshes.compilers import FOLDER, compiler_environment
from qkvflow.meshes.fitting import Change, changes, cheapest, told, try_changes
from qkvflow.meshes.groups import axes_of, first_group
from qkvflow.meshes.hlo import Instruction, Program
from qkvflow.meshes.report import TIGHT, MeshReport, summary
from qkvflow.meshes.roofline import roofline
from qkvflow.meshes.shape import MeshShape
from qkvflow.meshes.target import Target
from qkvflow.meshes.work import _positions, matrix_flops, memory_traffic
from qkvflow.runs.config import TrainConfig

# As a TPU's compiler writes: no trip counts but a counter, products of matrices as convolutions, memory spaces, and a
# kernel whose attributes fill several lines. A caller may stand before what it calls.
TPU = """HloModule jit_step

%body (s: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %s = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}) parameter(0)
  %two = s32[]{:T(128)} constant(2)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %x = bf16[8,16]{1,0:T(8,128)(2,1)} get-tuple-element(%s), index=1
  %f = bf16[8,16]{1,0:T(8,128)(2,1)} fusion(%x), kind=kOutput, calls=%product
  %copied = s32[]{:T(128)S(6)} copy(%i)
  %next = s32[]{:T(128)} add(%copied, %two)
  ROOT %out = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}) tuple(%next, %f)
}

%product (p: bf16[8,16]) -> bf16[8,16] {
  %p = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[16,16]{1,0:T(8,128)(2,1)} broadcast(%p), dimensions={0,1}
  ROOT %conv = bf16[8,16]{1,0:T(8,128)(2,1)} convolution(%p, %w), dim_labels=bf_io->bf
}

%condition (s: (s32[], bf16[8,16])) -> pred[] {
  %s = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}) parameter(0)
  %limit = s32[]{:T(128)} constant(11)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  ROOT %more = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

ENTRY %main (x: bf16[8,16]) -> bf16[8,16] {
  %x = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %start = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}) tuple(%one, %x)
  %kernel = f32[4]{0:T(128)} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={meta={
"block_q": 512
}}, metadata={op_name="splash_mha_fwd"}
  %chip = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} copy(%x)
  %loop = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}) while(%start), condition=%condition, body=%body
  ROOT %end = bf16[8,16]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""


def instruction(op: str, rest: str, name: str = "a", results: tuple = ()) -> Instruction:
    return Instruction(name, op, results, rest, 1.0, True)


def test_a_tpus_text_is_read():
    program = Program.read(TPU)
    assert program.unknown_loops == 0
    turns = 5  # 1, 3, 5, 7, 9
    assert matrix_flops(program) == turns * 2 * 8 * 16 * 16
    assert matrix_flops(program, "f32") == 0
    array = 8 * 16 * 2
    # Each turn reads and writes the array, copies its counter to the chip, adds 2 to it, compares it; the copy to the
    # chip reads the array; the kernel reads it and writes 16 bytes.
    counting = turns * (4 + 4 + 4) + turns * (4 + 4 + 1)
    assert memory_traffic(program) == turns * 2 * array + counting + array + (array + 16)


@pytest.mark.parametrize(("limit", "turns"), [(11, 5), (10, 5), (2, 1), (1, 0)])
def test_a_counter_that_does_not_meet_its_limit_turns_once_more(limit, turns):
    """From 1 in steps of 2 while below the limit."""
    program = Program.read(TPU.replace("constant(11)", f"constant({limit})"))
    assert matrix_flops(program) == turns * 2 * 8 * 16 * 16


def test_positions_of_a_convolution_by_hand():
    """Pairs of output and window position that meet an element, against counting them one by one."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        size, kernel, low, stride, spread, dilation = (int(n) for n in rng.integers(1, 5, 6))
        out = int(rng.integers(1, 9))
        places = [(o * stride - low + k * dilation, spread) for o in range(out) for k in range(kernel)]
        by_hand = sum(0 <= at <= (size - 1) * d and at % d == 0 for at, d in places)
        assert _positions(size, kernel, out, low, stride, spread, dilation) == by_hand or size == kernel == out == 1


def test_what_a_slice_and_an_update_move():
    text = """
%slicing (p: f32[100,8], i: s32[]) -> f32[1,8] {
  %p = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %part = f32[1,8]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,8}
}

%updating (p: f32[100,8], u: f32[1,8], i: s32[]) -> f32[100,8] {
  %p = f32[100,8]{1,0} parameter(0)
  %u = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %new = f32[100,8]{1,0} dynamic-update-slice(%p, %u, %i, %i)
}

ENTRY %main (p: f32[100,8], i: s32[]) -> f32[100,8] {
  %p = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,8]{1,0} fusion(%p, %i), kind=kLoop, calls=%slicing
  ROOT %all = f32[100,8]{1,0} fusion(%p, %row, %i), kind=kLoop, calls=%updating
}
"""
    row, index = 8 * 4, 4
    assert memory_traffic(Program.read(text)) == (2 * row + index) + (2 * row + index)


@pytest.mark.parametrize(
    ("groups", "expected", "axes"),
    [
        ("replica_groups={{0,4},{1,5}}", [0, 4], "data"),
        ("replica_groups=[2,4]<=[8]", [0, 1, 2, 3], "model"),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [0, 4], "data"),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'}", [0, 1, 2, 3], "model"),
        ("replica_groups=mesh['x'=2,'y'=4] {'x','y'}", list(range(8)), "data x model"),
        ("replica_groups=mesh['x'=8] {'x':(1)2}", [0, 4], "data"),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", [0, 1, 2, 3], "model"),
        ("replica_groups={}", list(range(8)), "data x model"),
        ("", None, ""),
    ],
)
def test_groups_lie_along_axes_of_the_mesh(groups, expected, axes):
    group = first_group(instruction("all-gather", groups), 8)
    assert group == expected
    assert axes_of(group or [], {"data": 2, "model": 4}) == axes


def test_a_collective_that_goes_on_counts_once():
    gather = '  %g = f32[8]{0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, metadata={op_name="w"}\n'
    parts = "".join(
        f"%async_collective_fusion.{n} (p: f32[2]) -> f32[8] {{\n  %p = f32[2]{{0}} parameter(0)\n{gather}}}\n\n"
        for n in (1, 2)
    )
    entry = (
        "ENTRY %main (p: f32[2]) -> f32[8] {\n  %p = f32[2]{0} parameter(0)\n"
        "  %a = f32[8]{0} fusion(%p), kind=kCustom, calls=%async_collective_fusion.1\n"
        "  ROOT %b = f32[8]{0} fusion(%p), kind=kCustom, calls=%async_collective_fusion.2\n}\n"
    )
    found = collectives(Program.read(parts + entry), {"data": 4}, [0, 0, 1, 1])
    assert found == [Collective("all-gather", 1.0, 32.0, "data", 24.0, 4, 2)]


def test_the_roofline_by_hand():
    chip = CHIPS["h200"]
    gather = Collective("all-gather", 1.0, 16e9, "data", 15e9, 16, 2)
    line = roofline(chip, 2e12, 1e12, 4.8e9, [gather])
    assert line.compute == pytest.approx(1e12 / 989.5e12 + 1e12 / 494.5e12)
    assert line.memory == pytest.approx(1e-3)
    # Each of two machines needs the other's half, 8e9, through eight adapters of 50 GB/s. A device receives 15e9 in
    # all, by NVLink at 450 GB/s and by its adapter.
    assert line.links == pytest.approx(max(15e9 / 500e9, 8e9 / 8 / 50e9))
    assert (line.seconds, line.bound) == (line.links, "links")
    assert line.mfu(1e15, chip, 16) == pytest.approx(1e15 / (line.seconds * 16 * 989.5e12))


@pytest.mark.parametrize(
    ("chip", "sent", "seconds"),
    [
        ("h200", Collective("all-reduce", 1.0, 8e9, "data", 14e9, 8, 1), 8 / 450),  # the switch adds
        ("a100", Collective("all-reduce", 1.0, 8e9, "data", 14e9, 8, 1), 14 / 300),
        ("v5e", Collective("all-reduce", 1.0, 8e9, "data", 14e9, 8, 2), 14 / 200),  # a slice has no machines
        ("h200", Collective("all-reduce", 1.0, 16e9, "data", 30e9, 16, 2), 16 / 8 / 50),  # two machines, eight adapters
        ("h200", Collective("all-reduce", 1.0, 2e9, "data", 2e9, 2, 2), 2 / 50),  # one device in each machine
        ("h200", Collective("all-to-all", 1.0, 16e9, "data", 15e9, 16, 2), 8 / 50),  # half of its parts, by its own
        ("h200", Collective("collective-permute", 1.0, 8e9, "data", 8e9, 16, 2), max(8 / 500, 1 / 50)),
    ],
)
def test_the_links_of_a_roofline_by_hand(chip, sent, seconds):
    assert roofline(CHIPS[chip], 0.0, 0.0, 0.0, [sent]).links == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "devices", "expected"),
    [
        ("v5e:4x4", None, "v5e:4x4"),
        ("v5e", 256, "v5e:16x16"),
        ("V4", 16, "v4:2x2x4"),
        ("h200", None, "h200:1x8"),
        ("h200:16", None, "h200:2x8"),
        ("b200:2x4", None, "b200:2x4"),
        ("a100", 1, "a100:1x1"),
    ],
)
def test_targets(text, devices, expected):
    assert str(Target.read(text, devices)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("v4", "v4:2x2x1"), ("v5p", "v5p:2x2x1"), ("v5e", "v5e:1x1"), ("v5e:2x4", "v5e:2x4"), ("h100", "h100:1x1")],
)
def test_a_decoding_step_takes_one_device_of_the_smallest_slice(text, expected, monkeypatch):
    compiled_for = []

    def describe_mesh(config, tokens, shape, run, target, slots, dtype):
        compiled_for.append((str(target), shape.devices, slots))
        return report(target=str(target), texts=slots)

    monkeypatch.setattr(program, "describe_mesh", describe_mesh)
    monkeypatch.setattr(program, "compiler_environment", lambda platform: {})
    words = ["--serve", "--target", text, "--slots", "3", "--config_path", str(ROOT / "configs/quickstart.yaml")]
    program.main(parse(program.DescribeConfig, program.arguments(words))[0])
    assert compiled_for == [(expected, Target.read(expected).devices, 3)]


@pytest.mark.parametrize(
    ("text", "devices", "said"),
    [
        ("v7", None, "Targets: v4, v5e"),
        ("v5e", None, "needs a number of chips"),
        ("v5e:5x5", None, "v5e has no topology 5x5: it has 1x1, 2x2"),
        ("v4:4x4", None, "v4 has no topology 4x4"),
        ("v5e:4x4", 64, "--mesh has 64 devices, but v5e:4x4 has 16 chips"),
        ("v5e", 48, "v5e has no slice with that many chips"),
        ("h100", 12, "12 GPUs do not fill machines of 8"),
        ("h100:0", None, "give a number of GPUs"),
        ("h100:1x2x3", None, "give a number of GPUs"),
        ("h100:²", None, "give a number of GPUs"),
        ("h200:2x16", None, "a machine has at most 8 GPUs; for 2 x 16 of them, `h200:32`"),
    ],
)
def test_other_targets_are_refused(text, devices, said):
    with pytest.raises(UserError, match=said):
        Target.read(text, devices)


def test_every_figure_of_a_chip_has_a_source():
    import qkvflow.meshes.chips as chips

    for kind, chip in CHIPS.items():
        (source,) = [
            part
            for part in chips.__doc__.split("\n    v" if chip.platform == "tpu" else "\n    ")
            if part.startswith(kind.removeprefix("v") if chip.platform == "tpu" else kind)
        ]
        assert f"{chip.flops / 1e12:g} TFLOP/s" in source.replace("as h100", "989.5 TFLOP/s")
        assert f"{chip.bandwidth / 1e9:g} GB/s" in source
        assert chip.dimensions in ((2, 3) if chip.platform == "tpu" else (0,))
    assert CHIPS["v5e"].memory == 16 * GIB


def test_without_the_compilers_one_line_says_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for platform in ("tpu", "gpu"):
        with pytest.raises(UserError, match=r"^--target needs .* make setup EXTRA=dev,targets .*$"):
            compiler_environment(platform)


def test_only_the_process_that_compiles_sees_them(tmp_path, monkeypatch):
    for part in ("libtpu", "jax_cuda12_plugin", "jax_plugins/xla_cuda12"):
        (tmp_path / part).mkdir(parents=True)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    tpu, gpu = compiler_environment("tpu"), compiler_environment("gpu")
    assert tpu["TPU_LIBRARY_PATH"] == str(tmp_path / "libtpu" / "libtpu.so")
    assert "PYTHONPATH" not in tpu  # nothing to import
    assert gpu["PYTHONPATH"] == str(tmp_path)
    assert str(tmp_path) not in sys.path


def report(**changed) -> MeshReport:
    fields = dict(mesh={"data": 4}, parameters=GIB, optimizer=2 * GIB, all_parameters=4 * GIB, all_optimizer=8 * GIB)
    fields |= dict(arguments=3 * GIB, outputs=3 * GIB, donated=3 * GIB, temporary=5 * GIB, flops=1e12, xla_flops=1e11)
    fields |= dict(unknown_loops=0, collectives=[Collective("all-gather", 1.0, 1e9, "data", 0.75e9, 4)])
    fields |= dict(whole_arguments=[], whole_temporaries=[], large=1 << 20, rematerialised=0, compile_seconds=1.0)
    fields |= dict(compile_bytes=GIB, devices=4, target="v5e:2x2", attention="splash", bytes_accessed=1e9)
    return MeshReport(**(fields | {"model_flops": 3e12} | changed))


def test_what_a_target_is_told():
    told = summary(report())
    assert set(told) >= {"target", "devices", "attention", "memory_bytes", "memory_limit_bytes", "fits", "flops"}
    assert set(told) >= {"bytes_accessed", "collective_bytes", "roofline_seconds", "mfu_bound"}
    assert (told["memory_bytes"], told["fits"]) == (8 * GIB, True)
    assert told["memory_limit_bytes"] == int(TIGHT * 16 * GIB)
    assert told["roofline_seconds"] == max(1e12 / 197e12, 1e9 / 819e9, 0.75e9 / 200e9) == 1e12 / 197e12
    assert told["mfu_bound"] == pytest.approx(0.75)
    rows = report().sections()
    assert rows["mesh"]["compiled for"] == "v5e:2x2"
    assert rows["memory per device"]["fits in 16 GiB"] == "yes, 50% free"
    assert rows["roofline"]["a step takes at least"] == "5.076 ms (compute)"
    assert rows["a step, per device"]["all-gather over data"] == "953.7 MiB, 1 times"
    large = report(temporary=13 * GIB)
    assert not large.fits_target
    assert large.sections()["memory per device"]["fits in 16 GiB"] == "no, 1.6 GiB above 90%"
    found = ("arguments", "outputs", "donated", "temporary", "collectives", "whole_temporaries")
    found += ("flops", "xla_flops", "unknown_loops", "compiled")
    refused = MeshReport.too_large(18 * GIB, **{k: v for k, v in vars(large).items() if k not in found})
    assert refused.memory == 18 * GIB
    assert refused.sections()["memory per device"]["fits in 16 GiB"] == "no, the compiler refuses it"
    assert summary(refused)["roofline_seconds"] is None
    assert json.dumps(summary(refused))


def test_what_would_fit_is_tried_and_the_cheapest_named():
    config = parse(TrainConfig, ["--config_path", str(ROOT / "configs/openwebtext/llama_1b.yaml")])[0]
    found = list(changes(config, MeshShape.read("64")))
    assert {c.what for c in found} == {"evaluate", "adjoint", "batch", "mesh"}
    compiled = []

    def compile_(change: Change) -> MeshReport:
        compiled.append(change)
        if change.what == "adjoint":
            raise UserError("this solver has no inverse")
        if change.what == "mesh":
            return report(flops=2e12)
        return report(flops=3e12) if change.words[-1] == "1" else report(temporary=20 * GIB)

    trials = try_changes(iter(found), compile_)
    assert [c for c in compiled if c.what == "mesh"] == [Change("mesh", ("--mesh", "32x2"))]  # the first one fits
    assert cheapest(trials).change.what == "mesh"
    lines = told(trials)
    assert lines[-1] == "the cheapest change that fits: --mesh 32x2"
    assert any("this solver has no inverse" in line for line in lines)

    def crash(change: Change) -> MeshReport:
        raise RuntimeError("compiling for v5e:2x2 failed with status -11:\nsegmentation fault")

    (crashed,) = try_changes(iter(found[:1]), crash)
    assert crashed.refused == "compiling for v5e:2x2 failed with status -11"
    assert told(try_changes(iter(found[:1]), lambda _: report(temporary=20 * GIB)))[-1].startswith("none of these fits")


def test_parts_of_a_batch_are_those_of_a_row_of_devices():
    config = parse(TrainConfig, ["--config_path", str(ROOT / "configs/openwebtext/llama_1b.yaml")])[0]
    assert config.trainer.train_batch_size == 256

    def tried(shape: str, config=config) -> dict[str, list[str]]:
        found = list(changes(config, MeshShape.read(shape)))
        return {what: [c.words[-1] for c in found if c.what == what] for what in ("batch", "mesh")}

    assert tried("8x8") == {"batch": ["16", "8", "4"], "mesh": ["32x2", "16x4"]}
    assert tried("64x1")["batch"] == tried("64")["batch"] == ["2", "1"]
    assert tried("256") == {"batch": [], "mesh": ["128x2", "64x4", "32x8"]}
    trainer = dataclasses.replace(config.trainer, mesh=MeshConfig(axes={"model": 8}))
    assert tried("64", dataclasses.replace(config, trainer=trainer)) == tried("8x8")


def test_every_configuration_is_meant_for_a_machine():
    named = {job.config for job in bench.jobs()}
    assert named == {str(p.relative_to(ROOT / "configs").with_suffix("")) for p in FILES} - {
        "finetune/pretrain_owt",
        "finetune/pretrain_wiki",
    }
    for job in bench.jobs():
        target = Target.read(job.machine.target)
        config = parse(TrainConfig, ["--config_path", str(ROOT / "configs" / f"{job.config}.yaml")])[0]
        assert config.trainer.batch_schedule.batch_size_at_step(0) % target.devices == 0 or job.machine.mesh
    assert yaml.safe_load(TARGETS.read_text())


def test_the_table_is_that_of_the_results():
    text = (ROOT / "docs" / "scale.md").read_text()
    for line in bench.page(bench.read()).splitlines():
        assert line in text, line


@pytest.mark.parametrize("words", [["--target", "v5e:3x3"], ["--mesh", "8x8", "--target", "v5e:4x4"]])
def test_mistakes_are_told_before_anything_is_compiled(words):
    words = program.arguments(["--config_path", str(ROOT / "configs/quickstart.yaml"), *words])
    with pytest.raises(UserError, match=r"3x3|64 devices"):
        program.main(parse(program.DescribeConfig, words)[0])


def described(tmp_path: Path, *words: str) -> dict:
    """What `describe --json` says of the quickstart, by the program."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "qkvflow.describe", "--config_path", "configs/quickstart.yaml"]
    done = subprocess.run(
        [*command, *words, "--json", str(out)], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())[
        "configs/quickstart" if "configs/quickstart" in out.read_text() else "quickstart"
    ]


def skip_without(platform: str) -> None:
    try:
        compiler_environment(platform)
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.parametrize(
    ("target", "kernel"), [("v5e:2x2", "splash (Pallas, TPU)"), ("h100:4", "flash (JAX, blocks in a loop)")]
)
def test_a_step_compiled_for_a_machine(tmp_path, target, kernel):
    skip_without("tpu" if target.startswith("v") else "gpu")
    found = described(tmp_path, "--target", target)
    assert found["attention"] == kernel
    assert found["devices"] == 4
    assert found["fits"]
    assert found["donated_bytes"] > 0.99 * found["mesh"]["parameters"]
    # The same work as on virtual CPUs but for what is computed again: products of matrices alone.
    virtual = described(tmp_path, "--mesh", "4")["mesh"]
    assert found["flops"] == pytest.approx(virtual["flops"], rel=0.1)
    parameters, optimizer = found["mesh"]["parameters"], found["mesh"]["optimizer"]
    batch = found["arguments_arrays_bytes"] - parameters - optimizer  # and counters
    assert 0 < batch < 0.01 * parameters
    if target.startswith("h"):  # a TPU fills up tiles of 8 x 128, which is much of arrays as small as these
        assert found["arguments_bytes"] == pytest.approx(found["arguments_arrays_bytes"], rel=0.01)
    assert found["arguments_bytes"] >= 0.999 * found["arguments_arrays_bytes"]
    assert 0 < found["mfu_bound"] < 1


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.parametrize(
    ("words", "kernel", "fallbacks"),
    [
        (("--model.hidden_dim", "96", "--model.block.num_heads", "2"), "splash (Pallas, TPU)", []),  # heads of 48
        (
            ("--model.hidden_dim", "160", "--model.block.num_heads", "2", "--model.block.attn_pdrop", "0.1"),
            "plain (all scores at once)",
            [
                "attention cannot be computed by splash: it has no dropout of the attention weights (attn_pdrop)."
                " Falling back to vanilla"
            ],
        ),
    ],
)
def test_the_kernel_of_a_tpu_and_what_it_cannot_take(tmp_path, words, kernel, fallbacks):
    skip_without("tpu")
    found = described(tmp_path, "--target", "v5e:1x1", *words)
    assert found["attention"] == kernel
    assert found["mesh"]["fallbacks"] == fallbacks


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.parametrize(
    ("target", "dtype", "width"), [("v5e:1x1", "bf16", 2), ("h100:1", "f32", 4), ("h100:1", "bf16", 2)]
)
def test_a_decoding_step_compiled_for_a_machine(tmp_path, target, dtype, width):
    skip_without("tpu" if target.startswith("v") else "gpu")
    found = described(tmp_path, "--serve", "--target", target, "--slots", "4", "--dtype", dtype)
    layers, embed, positions, slots = 6, 128, 128, 4
    keys_values = 2 * slots * positions * layers * embed * width
    weights = found["mesh"]["parameters"]
    weights_by_hand = found["sections"]["parameters, discretised"]["total"] * width
    head = 320 * embed * width  # the tied head of 257 columns once more, in panels of 64
    assert weights == weights_by_hand + head
    assert keys_values < found["donated_bytes"] < 1.02 * keys_values  # and texts, settings and biases of tokens
    assert found["arguments_arrays_bytes"] == pytest.approx(weights + keys_values, rel=0.02)
    assert found["arguments_bytes"] >= 0.999 * found["arguments_arrays_bytes"]
    assert found["texts"] == slots
    assert found["fits"]
    assert found["bytes_accessed"] > weights
    assert 0 < found["mfu_bound"] < 1


@pytest.mark.slow
@pytest.mark.program
def test_what_is_too_large_is_told_with_numbers_and_a_way_out(tmp_path):
    skip_without("tpu")
    words = ["--target", "v5e:1x1", "--trainer.train_batch_size", "8192"]
    found = described(tmp_path, *words)
    assert not found["fits"]
    assert found["memory_bytes"] > found["memory_limit_bytes"]
    assert found["roofline_seconds"] is None
    fitting = [t for t in found["would_fit"]["tried"] if t["fits"]]
    assert found["would_fit"]["cheapest"] in [t["change"] for t in fitting]
