"""The cost of a training step on many devices, from compiling it for virtual ones or another machine.

For `describe --mesh` and `--target`.
"""

from qkvflow.meshes.report import MeshReport as MeshReport
from qkvflow.meshes.shape import MeshShape as MeshShape
from qkvflow.meshes.target import Target as Target
from qkvflow.meshes.virtual import describe_mesh as describe_mesh
