"""Which package may import which: the packages from the bottom up."""

# A room may import itself and the rooms of the rows above its own.
ROWS = [
    ["errors"],
    ["system"],
    ["topology", "kernels"],
    ["config"],
    ["tensor_parallel"],
    ["model"],
    ["pipeline"],
    ["optim"],
    ["engine"],
    ["reporting"],
    ["offload"],
    ["exchange"],
    ["adapter"],
    ["any_module"],
    ["context_parallel", "plan"],
    ["deepspeed"],
    ["run"],
    ["cli"],
    ["__init__", "__main__"],
]
