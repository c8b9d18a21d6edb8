"""The presets: shapes of models by their usual names (GPT-2 small; GPT-3, Brown et al. 2020, table 2.1; 10B).

A preset may set any option of the model; what is typed beside it counts.
"""

from __future__ import annotations

PRESETS: dict[str, dict[str, object]] = {
    "31M": {"num_layers": 6, "hidden_size": 256, "num_attention_heads": 8, "seq_length": 2048},
    "70M": {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 2048},
    "124M": {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024},
    "350M": {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 2048},
    "760M": {"num_layers": 24, "hidden_size": 1536, "num_attention_heads": 16, "seq_length": 2048},
    "1.3B": {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048},
    "2.7B": {"num_layers": 32, "hidden_size": 2560, "num_attention_heads": 32, "seq_length": 2048},
    "6.7B": {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 2048},
    "10B": {"num_layers": 50, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 2048},
    "13B": {"num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "seq_length": 2048},
    "175B": {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "seq_length": 2048},
}
