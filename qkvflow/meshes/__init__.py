"""What a training step costs on a mesh of many devices, found by compiling it for virtual ones, or by the
compiler of a machine that is not here: `describe --mesh`, `--target`."""

from qkvflow.meshes.report import MeshReport as MeshReport
from qkvflow.meshes.shape import MeshShape as MeshShape
from qkvflow.meshes.target import Target as Target
from qkvflow.meshes.virtual import describe_mesh as describe_mesh
