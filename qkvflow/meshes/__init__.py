"""What a training step costs on a mesh of many devices, found by compiling it for virtual ones: `describe --mesh`."""

from qkvflow.meshes.report import MeshReport as MeshReport
from qkvflow.meshes.shape import MeshShape as MeshShape
from qkvflow.meshes.virtual import describe_mesh as describe_mesh
