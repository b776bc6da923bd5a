"""What is B? Ordinary transformer blocks used as vector fields dx/dt = B(x; W)."""

from qkvflow.blocks.config import BlockConfig as BlockConfig
from qkvflow.blocks.controlled import Controlled as Controlled
from qkvflow.blocks.gpt2 import Gpt2Block as Gpt2Block
from qkvflow.blocks.gpt2 import Gpt2BlockConfig as Gpt2BlockConfig
from qkvflow.blocks.inputs import Inputs as Inputs
from qkvflow.blocks.llama import LlamaBlock as LlamaBlock
from qkvflow.blocks.llama import LlamaBlockConfig as LlamaBlockConfig
from qkvflow.blocks.memory import Window as Window
from qkvflow.blocks.probe import Probe as Probe
from qkvflow.blocks.ssm import SsmBlock as SsmBlock
from qkvflow.blocks.ssm import SsmBlockConfig as SsmBlockConfig
from qkvflow.blocks.state_space import SsmMixer as SsmMixer
