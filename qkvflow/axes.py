"""The names of all axes: one vocabulary for shapes, docstrings and sharding.

| axis | meaning |
|---|---|
| `batch` | independent sequences |
| `position`, `key_position` | place in the sequence; attention renames it for keys, since one name is one axis |
| `vocab` | tokens of the vocabulary |
| `embed` | the state x(t), width d |
| `batch_heads` | the heads of all sequences, along one axis |
| `heads`, `head_size`, `qkv` | attention heads, their width, and the stack of query, key and value |
| `kv_head`, `q_heads_per_group` | heads of keys and values, and the query heads that share each |
| `mlp` | hidden units of the feed-forward block |
| `state` | the state of one channel of a state-space model |
| `taps` | a convolution's places: this position, the one before it, ... |
| `delta_rank` | the narrow place between the input and the step Delta of a selective state-space model |
| `layers` | points of layer-time, or layers of an ordinary stack (the axis of `haliax.nn.Stacked`) |
| `steps` | steps of the solver |
| `sinusoid` | features of time [t, sin, cos], size 2S+1 |
| `control` | components of a control signal u |
| `time_hidden`, `time_embed` | hidden and output units of a time network (generated weights: both of size T) |
| `basis` | functions of time whose combinations are weights |
| `features` | the longest axis of a generated or gating array without `embed`, sharded as `embed` is |
"""

BATCH = "batch"
BATCH_HEADS = "batch_heads"
POSITION = "position"
KEY_POSITION = "key_position"
VOCAB = "vocab"
EMBED = "embed"
HEADS = "heads"
HEAD_SIZE = "head_size"
QKV = "qkv"
KV_HEAD = "kv_head"
Q_HEADS_PER_GROUP = "q_heads_per_group"
MLP = "mlp"
STATE = "state"
TAPS = "taps"
DELTA_RANK = "delta_rank"
LAYERS = "layers"
STEPS = "steps"
SINUSOID = "sinusoid"
CONTROL = "control"
TIME_HIDDEN = "time_hidden"
TIME_EMBED = "time_embed"
BASIS = "basis"
FEATURES = "features"
