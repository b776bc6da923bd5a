"""Which kernel computes attention in a compiled step, read from the program itself."""

from qkvflow.meshes.hlo import Program

# Marks in names or origins of instructions, and their meaning; the first match counts.
_ATTENTION = (
    ("splash_m", "splash (Pallas, TPU)"),
    ("cudnn", "cuDNN"),
    ("nvte", "Transformer Engine"),
    ("pallas_attention", "flash (Pallas, GPU)"),
    ("flash_attention", "flash (JAX, blocks in a loop)"),
    ("dot_product_attention", "plain (all scores at once)"),
)


def attention_kernel(program: Program) -> str:
    """The kernel of self-attention, in words; "none" for a model without attention."""
    texts = [f"{i.name} {i.source} {i.rest if i.op == 'custom-call' else ''}".lower() for i in program.instructions()]
    return next((words for mark, words in _ATTENTION if any(mark in text for text in texts)), "none")
