"""The forms of a block: how far its first half has moved the state that its second half sees.

    B_h(x) = a + second(norm2(x + h a)),    a = attn(norm1(x))

parallel (the paper):        h = 0, so that both halves read x
sequential (GPT-2, Llama):   h = 1, so that x + B(x) is the ordinary layer
split:                       h is the length of the step in which the field is evaluated (`Inputs.step`)

An Euler step of the split form is two ordinary halves, one after the other, and with h = 1 the ordinary layer:

    x' = x + h attn(norm1(x)),    x + h B_h(x) = x' + h second(norm2(x'))

This is the Lie-Trotter splitting of the ODE dx/dt = attn(norm1(x)) + second(norm2(x)), of order 1: for h -> 0 the
parallel form, which is also what methods with several evaluations in a step and adaptive steps integrate (h = 0).
Source: Lu et al., Understanding and Improving Transformer From a Multi-Particle Dynamic System Point of View (arXiv
1906.02762), who read the ordinary layer in this way.
"""

from haliax import NamedArray

from qkvflow.blocks.inputs import Inputs

FORMS = ("parallel", "sequential", "split")


def seen_by_second_half(form: str, x: NamedArray, attn: NamedArray, inputs: Inputs) -> NamedArray:
    """x + h a, the input of the second norm."""
    h = {"parallel": 0.0, "sequential": 1.0, "split": inputs.step}[form]
    return x if h == 0.0 else inputs.see("mid", x + (attn if h == 1.0 else attn * h))
