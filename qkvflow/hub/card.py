"""README.md of an exported folder: the model card."""

import json
from dataclasses import dataclass
from typing import Any

import yaml

from qkvflow.config import encode
from qkvflow.models import NeuralOdeConfig

_KNOWN = ("train", "validation", "validation_fraction", "tokenizer")


@dataclass(frozen=True)
class Card:
    """
    Attributes:
        name: of the folder.
        origin: the run and its checkpoint.
        made: the command.
        trained: the run's own model; None for an ordinary one.
        exported: the model as ordinary layers.
        data: the run's `data`.
        losses: by name, from the last step that recorded them.
        reason: why the folder contains code; None for a native class.
        class_name: the class that loads it.
    """

    name: str
    origin: str
    made: str
    trained: NeuralOdeConfig | None
    exported: NeuralOdeConfig
    data: Any
    losses: dict[str, float]
    reason: str | None
    class_name: str

    def text(self) -> str:
        """The page, with its metadata header for the hub."""
        header = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["qkvflow"]}
        quoted = json.dumps(self.name, ensure_ascii=False)
        remote = "" if self.reason is None else ", trust_remote_code=True"
        return f"""---
{yaml.safe_dump(header, sort_keys=False)}---

# {" ".join(self.name.split())}

A language model of class `{self.class_name}`, {self.origin}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({quoted})
model = AutoModelForCausalLM.from_pretrained({quoted}{remote})
tokens = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=50)[0]))
```

## Depth

{self._depth()}

## Data and loss

{self._data()}
{self._losses()}

## How it was made

    {self.made}
"""

    def _depth(self) -> str:
        depth, layers = self.exported.depth, self.exported.prelude_layers + self.exported.coda_layers
        around = f", and {layers} ordinary layers around it" if layers else ""
        if self.trained is None:
            what = f"An ordinary model of {depth.reading_steps + layers} layers."
        else:
            weights, steps = encode(self.trained.weights)["type"], encode(self.trained.depth.steps)
            what = (
                f"A flow dx/dt = B(x; W(t)) with `{weights}` weights, trained with `steps: {steps}`, exported with"
                f" {depth.reading_steps} steps of `{depth.solver}`{around}."
            )
        if self.reason is None:
            return f"{what} It is a native class of transformers and needs no code."
        return f"{what} No transformers class implements it ({self.reason}): the code is in `modeling_qkvflow.py`."

    def _data(self) -> str:
        data = encode(self.data)
        known = {key: data[key] for key in _KNOWN if data.get(key) is not None}
        if not data.get("train"):
            known["components"] = sorted(data.get("components") or {"builtin": None})
        return "```yaml\n" + yaml.safe_dump(known, sort_keys=False) + "```"

    def _losses(self) -> str:
        if not self.losses:
            return "\nNo loss was recorded."
        rows = "\n".join(f"| {name} | {loss:.4f} |" for name, loss in self.losses.items())
        return f"\n| nats per token{self._losses_depth()} | |\n|---|---|\n{rows}"

    def _losses_depth(self) -> str:
        """The depth that the losses were measured at, if the model is exported at another one."""
        if self.trained is None:
            return ""
        depth = self.trained.depth
        if depth.is_adaptive:
            return ", with the adaptive steps of training"
        steps = depth.reading_steps
        return "" if steps == self.exported.depth.reading_steps else f", at the trained depth, {steps} steps"
