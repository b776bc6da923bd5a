"""The report of `describe --mesh` in parts: mesh shapes, XLA's text, refusals, stages. Divided steps:
test_mesh_step."""

import dataclasses
import json
import warnings
from types import SimpleNamespace

import haliax as hax
import pytest
from levanter.trainer import TrainerConfig
from levanter.utils.mesh import MeshConfig
from support.models import VOCAB, llama, small_config
from support.tiny import FLOW, tiny

from qkvflow import describe as program
from qkvflow.cli import parse
from qkvflow.config import decode
from qkvflow.errors import Notice, UserError
from qkvflow.meshes.ahead import compile_ahead
from qkvflow.meshes.collectives import Collective, collectives
from qkvflow.meshes.hlo import Program
from qkvflow.meshes.report import GIB, MeshReport, as_dict
from qkvflow.meshes.shape import MeshShape
from qkvflow.meshes.whole import Whole, whole_temporaries
from qkvflow.meshes.work import matrix_flops
from qkvflow.runs.config import TrainConfig
from qkvflow.training.checks import model_shape
from qkvflow.training.mesh import check_mesh, complete_mesh

SMALL = "model: {type: neuralode, hidden_dim: 16, block: {type: gpt2, num_heads: 2}}\ndata: {tokenizer: byte}"
HLO = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: f32[8,4]) -> f32[8,8] {
  %p = f32[8,4]{1,0} parameter(0)
  %big = f32[8,16]{1,0} broadcast(%p), dimensions={0}
  ROOT %dot.1 = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%body (s: (s32[], f32[2,4])) -> (s32[], f32[2,4]) {
  %s = (s32[], f32[2,4]{1,0}) parameter(0)
  %w = f32[2,4]{1,0} get-tuple-element(%s), index=1
  %whole = f32[8,4]{1,0} all-gather(%w), replica_groups=mesh['a'=4,'b'=2] {'a'}, metadata={op_name="w"}
  %squares = f32[8,8]{1,0} fusion(%whole), kind=kLoop, calls=%fused
  ROOT %out = (s32[], f32[2,4]{1,0}) tuple(%w, %w)
}

%condition (s: (s32[], f32[2,4])) -> pred[] {
  %s = (s32[], f32[2,4]{1,0}) parameter(0)
  ROOT %more = pred[] compare(%s, %s)
}

%left (x: f32[4]) -> f32[4] {
  ROOT %r = f32[4]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
}

%right (x: f32[4]) -> f32[4] {
  ROOT %alone = f32[4]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add
}

ENTRY %main (x: (s32[], f32[2,4]), y: f32[4]) -> f32[4] {
  %x = (s32[], f32[2,4]{1,0}) parameter(0)
  %y = f32[4]{0} parameter(1)
  %loop = (s32[], f32[2,4]{1,0}) while(%x), condition=%condition, body=%body, config={"known_trip_count":{"n":"6"}}
  %again = (s32[], f32[2,4]{1,0}) while(%x), condition=%condition, body=%body
  ROOT %one = f32[4]{0} conditional(%y, %y, %y), branch_computations={%left, %right}
}
"""


def test_what_is_in_loops_counts_as_often_as_they_turn():
    program = Program.read(HLO)
    assert program.unknown_loops == 1
    assert matrix_flops(program) == (6 + 1) * 2 * 8 * 8 * 4
    assert collectives(program) == [
        Collective("all-gather", 7.0, 7.0 * 8 * 4 * 4, sent=7.0 * 8 * 4 * 4 * 3 / 4, devices=4),  # the larger side
        Collective(
            "all-reduce", 0.5, 0.5 * 16, sent=2 * 0.5 * 16 / 2, devices=2
        ),  # one of two branches; the other has groups of one device
    ]


def test_whole_arrays_are_those_of_the_undivided_program():
    lowered = """
  func.func public @main(%arg0: tensor<4x8xf32>) {
    %0 = sdy.manual_computation(%arg0) in_shardings=[<@mesh, [{}, {}]>] manual_axes={} (%arg1: tensor<8x8xf32>) {
      %9 = call @inside(%arg1) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    } : (tensor<4x8xf32>) -> tensor<4x8xf32>
  }
  func.func private @inside(%arg0: tensor<8x8xf32>) {
  }
"""
    assert whole_temporaries(Program.read(HLO), lowered, large=100) == [Whole("w", (8, 4), 128, 7.0)]
    assert whole_temporaries(Program.read(HLO), lowered, large=128) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64", MeshShape(64)),
        ("8x4", MeshShape(32, (("data", 8), ("model", 4)))),
        ("2X4x8", MeshShape(64, (("replica", 2), ("data", 4), ("model", 8)))),
    ],
)
def test_mesh_shapes(text, expected):
    shape = MeshShape.read(text)
    assert shape == expected
    ici, _ = shape.applied(TrainerConfig()).mesh.axis_shapes(shape.devices, 1)
    assert {name: n for name, n in ici.items() if n > 1} == (dict(expected.axes) or {"data": 64})


@pytest.mark.parametrize("text", ["", "0", "8x", "8x0", "-8", "2x2x2x2", "eight", "8*8"])
def test_other_mesh_shapes_are_refused(text):
    with pytest.raises(UserError, match="data x model"):
        MeshShape.read(text)


def test_an_axis_of_its_own_stays_with_the_configuration():
    trainer = TrainerConfig(mesh=MeshConfig(axes={"data": -1, "context": 2}))
    with pytest.raises(UserError, match="--mesh 64"):
        MeshShape.read("8x8").applied(trainer)
    assert MeshShape.read("64").applied(trainer).mesh.axes == {"data": -1, "context": 2}


def trainer_of(axes, **mesh):
    """What the checks read of a trainer, as though there were devices enough."""
    config = MeshConfig(axes=axes, **mesh)
    names = {"data": 1, "replica": 1, "model": 1, "replica_dcn": 1} | axes
    return SimpleNamespace(
        mesh=config,
        device_mesh=SimpleNamespace(shape=names),
        compute_axis_mapping=config.resolved_compute_mapping,
        parameter_axis_mapping=config.resolved_param_mapping,
    )


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (trainer_of({"model": 4}), r"`heads` of .*\(size 2\) over the 4 devices of model"),
        (trainer_of({"data": 3}), r"`embed` of .*\(size 16\) over the 3 devices of data"),
        (trainer_of({"context": 5}, compute_mapping={"position": "context"}), r"`position` of a sequence \(size 12\)"),
        (trainer_of({"data": 2}, param_mapping={"embed": "data", "mlp": "data"}), "twice over `data`"),
        (trainer_of({"data": 2}, param_mapping={"embed": "dta"}), "`dta`, which is not an axis of the mesh"),
        (trainer_of({"data": 2}, param_mapping={"embed": ["data", "foo"]}), "`foo`, which is not an axis of the mesh"),
        (trainer_of({"data": 2}, compute_mapping={"mlp": "foo"}), "maps `mlp` to `foo`"),
        (trainer_of({"data": 2}, compute_mapping={"batch": "foo"}), "maps `batch` to `foo`"),
        (trainer_of({"data": 2}, compute_mapping={"embed": "data"}), r"\{batch, position, embed\}.* twice over `data`"),
        (trainer_of({"data": 2}, compute_mapping={"head_size": "data"}), r"heads, head_size\}.* twice over `data`"),
        (trainer_of({"model": 2}, shared_mapping={"position": "model"}), "twice over `model`"),
    ],
)
def test_what_cannot_be_divided_is_named(trainer, said):
    model = model_shape(small_config(), VOCAB)
    with pytest.raises(UserError, match=said):
        check_mesh(trainer, model, hax.Axis("position", 12))
    check_mesh(trainer_of({"data": 4, "model": 2}), model, hax.Axis("position", 12))


def test_unknown_axes_are_named_before_a_mesh_is_completed():
    model = model_shape(small_config(), VOCAB)
    with pytest.raises(UserError, match="`foo`, which is not an axis of the mesh"):
        complete_mesh(trainer_of({"data": 2}, param_mapping={"embed": ["data", "foo"]}), model)


def test_an_axis_that_nothing_has_gets_a_notice():
    model, Pos = model_shape(small_config(), VOCAB), hax.Axis("position", 12)
    with pytest.warns(Notice, match="maps `embd`, but no array"):
        check_mesh(trainer_of({"data": 2}, param_mapping={"embd": "data"}), model, Pos)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_mesh(trainer_of({"data": 2}, shared_mapping={"mlp": "model", "kv_head": "model"}), model, Pos)


def completed(shapes, **devices: int):
    """The mapping of parameters."""

    class Trainer(TrainerConfig):
        device_mesh = SimpleNamespace(shape={"data": 1, "replica": 1, "model": 1, "replica_dcn": 1} | devices)

    return complete_mesh(Trainer(), shapes).parameter_axis_mapping


def test_features_are_divided_only_if_they_can_be():
    model = model_shape(small_config(), VOCAB)  # features of 8 and 32 (head_size, mlp)
    assert completed(model, data=8)["features"] == "data"
    assert "features" not in completed(model, data=16)


def test_heads_of_keys_are_divided_only_if_they_can_be():
    model = model_shape(small_config(block=llama("official", num_heads=4, num_kv_heads=2)), VOCAB)
    assert completed(model, model=2)["kv_head"] == "model"
    assert "kv_head" not in completed(model, model=4)


def report(**changes):
    fields = dict(mesh={"data": 8}, parameters=GIB, optimizer=2 * GIB, all_parameters=8 * GIB, all_optimizer=16 * GIB)
    fields |= dict(arguments=3 * GIB, outputs=3 * GIB, donated=3 * GIB, temporary=12 * GIB, flops=1e12, xla_flops=1e11)
    fields |= dict(unknown_loops=0, collectives=[], whole_arguments=[], whole_temporaries=[], large=1 << 20)
    return MeshReport(**(fields | dict(rematerialised=0, compile_seconds=1.0, compile_bytes=GIB) | changes))


def test_the_report_says_what_fits_and_warns():
    plain = report(collectives=[Collective("all-gather", 3.0, 1e9)], whole_temporaries=[Whole("w", (2, 3), 24, 1.0)])
    assert plain.memory == 15 * GIB
    assert plain.fits == {16: False, 32: True, 80: True}  # 15 of 16 leave too little for the runtime
    told = plain.sections()["memory per device"]
    assert told["fits in 16 GiB"] == "no, 614.4 MiB above 90%"  # 15 - 0.9 x 16 = 0.6: by so much it must shrink to fit
    assert told["fits in 32 GiB"] == "yes, 53% free"
    assert plain.warnings() == []
    (warned,) = report(whole_arguments=[Whole("p", (9,), GIB, 0.0)]).warnings()
    assert warned.startswith("1 GiB of parameters and optimizer are not sharded")
    (warned,) = report(whole_temporaries=[Whole("w", (9,), GIB, 1.0)]).warnings()
    assert "is created whole on every device" in warned
    (warned,) = report(donated=GIB).warnings()
    assert "both exist" in warned
    assert MeshReport.read(dataclasses.asdict(plain)) == plain
    assert as_dict(plain)["fits_gib"] == {"16": False, "32": True, "80": True}


def test_the_program_refuses_early():
    with pytest.raises(UserError, match="data x model"):
        program.main(program.DescribeConfig(run=["runs/a"], mesh="8*8"))
    words = program.arguments(["--mesh", "8x8", "--config_path", "a.yaml", "--json", "b.json"])
    assert parse(program.DescribeConfig, words)[0] == program.DescribeConfig(["a.yaml"], mesh="8x8", json="b.json")
    assert parse(program.DescribeConfig, program.arguments(["--mesh", "8"]))[0].mesh == "8"
    assert decode(TrainConfig, {"model": {"type": "neuralode"}}).trainer.mesh == MeshConfig()


@pytest.mark.parametrize("error", [UserError("no heads"), RuntimeError("crashed"), KeyboardInterrupt("stopped")])
def test_what_is_compiled_is_told_though_the_next_one_is_refused(tmp_path, monkeypatch, capsys, error):
    def describe_mesh(config, *rest):
        if config.trainer.train_batch_size == 16:
            raise error
        return report(whole_arguments=[Whole("the_head", (9,), GIB, 0.0)])

    monkeypatch.setattr(program, "describe_mesh", describe_mesh)
    good, bad, found = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "found.json"
    good.write_text(f"{SMALL}\ntrainer: {{train_batch_size: 8}}")
    bad.write_text(f"{SMALL}\ntrainer: {{train_batch_size: 16}}")
    with pytest.raises(type(error), match=str(error)):
        program.main(program.DescribeConfig([str(good), str(bad)], mesh="2", json=str(found)))
    assert "the_head" in capsys.readouterr().out
    written = json.loads(found.read_text())
    assert ["mesh" in column for column in written.values()] == [True, False]
    found.unlink()
    with pytest.raises(type(error), match=str(error)):  # nothing was compiled
        program.main(program.DescribeConfig([str(bad)], mesh="2", json=str(found)))
    assert capsys.readouterr().out == ""
    assert not found.exists()


def test_axes_of_all_files_are_checked_before_one_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "describe_mesh", lambda *given: pytest.fail("compiled"))
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(SMALL)
    bad.write_text(f"{SMALL}\ntrainer: {{mesh: {{axes: {{data: -1, context: 2}}}}}}")
    with pytest.raises(UserError, match="also has"):
        program.main(program.DescribeConfig([str(good), str(bad)], mesh="2x1"))


def test_of_a_growing_depth_the_deepest_stage_is_compiled(tmp_path):
    def compiled(steps, **depth):
        model = FLOW | {"depth": {"steps": steps, "adjoint": "direct"} | depth}
        return compile_ahead(decode(TrainConfig, tiny(tmp_path, "a", model)), 257)

    deep = compiled(4)
    grown = compiled({"grow": {"0.0": 1, "0.5": 4}})
    shifted = compiled({"grow": {"0.0": 1, "0.5": 3}}, time_sampling="jitter")  # and one additional step
    assert grown.memory == pytest.approx(deep.memory, rel=0.01)
    assert grown.flops == deep.flops
    assert grown.model_flops == shifted.model_flops == deep.model_flops
    assert shifted.flops == pytest.approx(deep.flops, rel=0.01)
